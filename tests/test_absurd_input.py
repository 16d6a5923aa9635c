"""Hostile or absurd input of commands: one line, exit code 2, nothing written or started, nothing endless."""

import json
import os
import stat
from pathlib import Path

import pytest

from hybridpipe.cli import main
from hybridpipe.errors import UserError
from hybridpipe.files import MOST_BYTES, parse, read_profile, read_text
from hybridpipe.launch import supervisor
from hybridpipe.launch.mpirun import mpirun_command
from hybridpipe.planning.checks import MAX_RANKS
from hybridpipe.planning.profile import ModelProfile

LAYER = {"name": "a", "forward_seconds": 1, "backward_seconds": 2, "parameter_bytes": 3, "output_bytes": 4}
CONFIG = """
[model]
factory = "nowhere:net"
[data]
factory = "nowhere:data"
[optimizer]
factory = "torch.optim:SGD"
[train]
minibatch = 8
"""
BIG = "1000000000000000000000"


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    profile = {"format": "hybridpipe-profile/1", "samples": 2, "layers": [LAYER | {"activation_bytes": 5}]}
    (tmp_path / "p.json").write_text(json.dumps(profile))
    assert main.main(["probe", "--flat", "4", "--out", "c.json"]) == 0
    assert main.main(["plan", "--profile", "p.json", "--cluster", "c.json", "--out", "four.json"]) == 0
    (tmp_path / "c.toml").write_text(CONFIG)
    os.mkfifo(tmp_path / "fifo")
    return tmp_path


PLAN = "plan --profile p.json --cluster c.json"


@pytest.mark.parametrize(
    "command, told",
    [
        (f"{PLAN} --minibatch {BIG}", f"--minibatch: must be an integer <= {2**53}, got '{BIG}'"),
        (f"{PLAN} --ranks {BIG}", f"--ranks: must be an integer <= {MAX_RANKS}, got"),
        (f"{PLAN} --memory {'9' * 5000}", "--memory: must be such as 2GB, 512MiB"),
        (f"{PLAN} --out .", ".: cannot be written: it exists and is no regular file"),
        (f"{PLAN} --out fifo", "fifo: cannot be written: it exists and is no regular file"),
        (f"{PLAN} --out p.json/x.json", "p.json/x.json: cannot be written: Not a directory"),
        (f"{PLAN} --out none/x.json", "none/x.json: cannot be written: No such file or directory"),
        ("plan --profile fifo --cluster c.json", "fifo: must be a regular file"),
        ("plan --profile p.json --cluster /dev/zero", "/dev/zero: must be a regular file"),
        ("plan --profile . --cluster c.json", ".: cannot be read: Is a directory"),
        ("simulate --plan fifo --profile p.json --cluster c.json", "fifo: must be a regular file"),
        ("simulate --plan four.json --profile p.json --cluster c.json --trace .", ".: cannot be written: "),
        (
            "simulate --plan four.json --profile p.json --cluster c.json --plot fifo",
            "fifo: cannot be written: ",
        ),
        ("profile --from-pipedream /dev/zero", "/dev/zero: must be a regular file"),
        ("probe --flat 1000000000000000000000000000000 --out big.json", "--flat: must be an integer <= "),
        (f"launch --ranks {BIG} -- train c.toml", "--ranks: must be an integer <= "),
        (f"launch --hosts a:{BIG} -- train c.toml", "--hosts: ranks of a must be an integer <= "),
        ("launch --ranks 2 -- train fifo", "fifo: must be a regular file"),
        ("launch --ranks 2 -- train c.toml --plan nope.json", "nope.json: cannot be read: No such file"),
        ("launch --ranks 2 -- train c.toml --plan four.json", "four.json: plan needs 4 = 4 ranks, got 2"),
        ("launch --ranks 2 -- train c.toml --cluster nope.json", "nope.json: cannot be read: No such file"),
        ("launch --ranks 2 -- train c.toml --resume nope", "nope: --resume: does not exist"),
        ("launch --ranks 2 -- train c.toml --resume-changed", "--resume-changed goes with --resume"),
        ("launch --ranks 2 -- train c.toml --out p.json/x", "p.json/x: cannot be made: Not a directory"),
    ],
)
def test_it_is_told_in_one_line(folder, capsys, monkeypatch, command, told):
    monkeypatch.setattr(supervisor.mpirun, "start", lambda *_, **__: pytest.fail("ranks were started"))
    before = sorted(folder.rglob("*"))
    try:
        code = main.main(command.split())
    except SystemExit as left:  # argparse's way
        code = left.code
    (line,) = capsys.readouterr().err.splitlines()
    assert code == 2 and told in line
    assert sorted(folder.rglob("*")) == before
    assert stat.S_ISFIFO((folder / "fifo").stat().st_mode)


def test_whatever_is_written_can_be_read(folder, capsys):
    """A cluster of 10^30 ranks was written, and refused by the next command."""
    for ranks in (1, 4096, MAX_RANKS):
        assert main.main(["probe", "--flat", str(ranks), "--out", "c.json"]) == 0
        assert main.main([*PLAN.split(), "--ranks", "1"]) == 0
        capsys.readouterr()


def test_a_folder_that_cannot_be_written_to_is_told(folder, capsys, monkeypatch):
    def refuse(**_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(supervisor.tempfile, "mkdtemp", refuse)  # root may write anywhere
    assert main.main(["launch", "--ranks", "2", "--", "train", "c.toml", "--out", "out"]) == 2
    assert capsys.readouterr().err == "hybridpipe: out: cannot be written: Permission denied\n"


@pytest.mark.parametrize(
    "env, told",
    [
        (
            {"HYBRIDPIPE_MPIRUN_FLAGS": "--mca 'a b"},
            "HYBRIDPIPE_MPIRUN_FLAGS cannot be read as a shell would",
        ),
        ({"SLURM_JOB_NUM_NODES": "two"}, "SLURM_JOB_NUM_NODES must be an integer >= 1, got 'two'"),
    ],
)
def test_a_variable_that_cannot_be_understood_is_told(env, told):
    with pytest.raises(UserError, match=told):
        mpirun_command(2, ["true"], env)


def test_flags_are_split_as_a_shell_does():
    argv, _ = mpirun_command(2, ["true"], {"HYBRIDPIPE_MPIRUN_FLAGS": "--mca x 'a b' --tag \"it's\""})
    at = argv.index("--tag")
    assert argv[at - 3 : at + 2] == ["--mca", "x", "a b", "--tag", "it's"]


def test_a_number_of_slurm_that_is_none_is_told():
    with pytest.raises(UserError, match="SLURM_NTASKS must be an integer >= 1, got 'many'"):
        supervisor.places(None, {}, {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "many"})


def test_a_file_is_measured_before_it_is_read(tmp_path):
    huge = tmp_path / "huge.json"
    with huge.open("wb") as file:
        file.truncate(MOST_BYTES + 1)  # takes no room
    with pytest.raises(UserError, match=r"huge.json: must have at most 67,108,864 bytes, got 67,108,865"):
        read_text(huge)


def test_of_many_wrong_items_the_first_is_told(tmp_path):
    """Each of them was collected: a manifest of ten million entries took 15 GB."""
    items = 300_000
    told = r"layers\[0\].name: is required, but missing"
    with pytest.raises(UserError, match=told):
        parse(
            ModelProfile, {"format": "hybridpipe-profile/1", "samples": 1, "layers": [{}] * items}, "p.json"
        )
    good = LAYER | {"activation_bytes": 5}
    document = {"format": "hybridpipe-profile/1", "samples": 1, "layers": [good, good | {"name": 3}]}
    (tmp_path / "p.json").write_text(json.dumps(document))
    with pytest.raises(UserError, match=r"p.json: layers\[1\].name: must be a valid string, got 3"):
        read_profile(tmp_path / "p.json")
