"""Batch scripts: what is asked for stands in the text, bash reads it, and words reach programs whole."""

import math
import re
import shlex
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from hybridpipe.launch.batch import Batch, example, limit_seconds, script

ROOT = Path(__file__).parents[2]
TRAIN = Batch(("train", "runs/my net.toml", "--out", "it's"), nodes=4, ntasks_per_node=2)
SCRIPT = Batch(("python", "train.py", "--lr", "$HOME"), nodes=1, ntasks_per_node=4, gpus_per_node=4)


def options(text: str) -> dict[str, str]:
    """The options of sbatch by name, with their values as sbatch reads them."""
    words = [shlex.split(line) for line in re.findall(r"^#SBATCH (.*)", text, re.M)]
    return dict(each[0].removeprefix("--").partition("=")[::2] for each in words)


def launched(text: str) -> list[list[str]]:
    """The words of each call of `hybridpipe launch`, as a shell splits them."""
    calls = re.findall(r'"\$python" -m hybridpipe launch (.*?)\n', text.replace("\\\n", ""))
    return [shlex.split(call) for call in calls]


def test_the_static_script_is_the_generators():
    assert (ROOT / "launch/slurm.sbatch").read_text() == example()


def test_defaults_ask_for_ranks_a_notice_and_a_place_in_the_queue():
    text = script(TRAIN)
    assert options(text) == {
        "job-name": "my_net", "nodes": "4", "ntasks-per-node": "2", "cpus-per-task": "1",
        "output": "my_net-%j.log", "open-mode": "append", "requeue": "", "signal": "B:USR1@120",
    }  # fmt: skip
    doctor, train = launched(text)
    assert doctor == ["--launcher", "srun", "--", "hybridpipe", "doctor"]
    first = shlex.split("--launcher srun --max-restarts 3 --deadline 100 --requeue --")
    assert train == [*first, *TRAIN.command, "--resume", "auto"]


def test_what_is_given_stands_in_the_script():
    given = replace(
        TRAIN, cpus_per_task=8, gpus_per_node=4, mem="64G", time="1-00:00:00", account="a b", partition="gpu",
        output="out/%x.log", extra=("--qos=high",), notice_seconds=600, max_restarts=0, venv="/v/my env",
    )  # fmt: skip
    text = script(given, ["hybridpipe", "slurm", "a\nb"])
    found = options(text)
    assert found["gpus-per-node"] == "4" and found["cpus-per-task"] == "8" and found["mem"] == "64G"
    assert found["time"] == "1-00:00:00" and found["account"] == "a b" and found["partition"] == "gpu"
    assert found["output"] == "out/%x.log" and found["qos"] == "high" and found["signal"] == "B:USR1@600"
    assert launched(text)[1][:6] == shlex.split("--launcher srun --max-restarts 0 --deadline 500")
    assert "\n. '/v/my env/bin/activate' || exit 1\n" in text
    assert "# Made by `hybridpipe slurm 'a b'`.\n" in text, "a comment is one line"


def test_the_launcher_is_that_of_every_call():
    text = script(replace(TRAIN, launcher="mpirun"))
    assert all(words[:2] == ["--launcher", "mpirun"] for words in launched(text))


def test_modules_are_loaded_in_a_login_shell():
    text = script(replace(TRAIN, modules=("gcc/12", "openmpi/5")))
    assert text.startswith("#!/bin/bash -l\n") and "\nmodule load gcc/12 openmpi/5 || exit 1\n" in text
    assert script(TRAIN).startswith("#!/usr/bin/env bash\n")


def test_a_script_resumes_by_itself_and_its_words_stay():
    text = script(SCRIPT)
    assert launched(text)[1][-5:] == ["--", "python", "train.py", "--lr", "$HOME"]
    assert options(text)["job-name"] == "train"


@pytest.mark.parametrize(
    "batch, words",
    [
        (TRAIN, ["apptainer", "exec", "a b.sif", "hybridpipe", *TRAIN.command, "--resume", "auto"]),
        (SCRIPT, ["apptainer", "exec", "--nv", "a b.sif", *SCRIPT.command]),
    ],
    ids=["train", "script-with-gpus"],
)
def test_in_a_container_each_rank_is_apptainers(batch, words):
    doctor, train = launched(script(replace(batch, container="a b.sif")))
    assert train[train.index("--") + 1 :] == words
    assert doctor[-2:] == ["hybridpipe", "doctor"] and "apptainer" in doctor


@pytest.mark.parametrize("change", [{}, {"modules": ("x",), "venv": "/v"}, {"container": "i.sif"}], ids=str)
@pytest.mark.parametrize("batch", [TRAIN, SCRIPT], ids=["train", "script"])
def test_bash_and_shellcheck_read_it(tmp_path, batch, change):
    (tmp_path / "job.sh").write_text(script(replace(batch, **change), ["hybridpipe", "slurm"]))
    checks = [["bash", "-n"]]
    if shutil.which("shellcheck"):  # SC1091: the environment's activate is not there; SC2016: $HOME as given
        checks.append(["shellcheck", "--exclude=SC1091,SC2016"])
    for check in checks:
        done = subprocess.run([*check, str(tmp_path / "job.sh")], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr


def test_time_limits_are_read_as_slurm_reads_them():
    minute, hour, day = 60, 3600, 86400
    read = {
        "30": 30 * minute, "1:30": 90, "12:00:00": 12 * hour, "1-12": day + 12 * hour,
        "2-0:30": 2 * day + 30 * minute, "1-00:00:05": day + 5, "0": math.inf,
    }  # fmt: skip
    assert {each: limit_seconds(each) for each in read} == read


SLURM = """#!/bin/sh
echo "$(basename $0) $*" >> calls
[ -z "$ASKS" ] || kill -USR1 $PPID
"""


@pytest.mark.parametrize("asks", ["", "1"])
def test_a_notice_while_the_hosts_are_checked_returns_the_job_to_the_queue(tmp_path, asks):
    """It killed the script, or the ranks of the doctor; the job was over, and nothing was trained."""
    for name in ("python", "scontrol"):
        (tmp_path / name).write_text(SLURM)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "job.sh").write_text(script(SCRIPT))
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "ASKS": asks}
    done = subprocess.run(["bash", "job.sh"], cwd=tmp_path, env=env, capture_output=True, timeout=60)
    first, *others = (tmp_path / "calls").read_text().splitlines()
    assert first.endswith("-- hybridpipe doctor")
    if asks:
        assert others == ["scontrol requeue 7"] and done.returncode == 75
    else:
        assert len(others) == 1 and "--requeue -- python train.py" in others[0] and done.returncode == 0
