"""What is saved is all there is: a training that is resumed is the one that never ended.

Dropout, shuffled data, noise from the process's generators, batch normalisation, SGD with momentum and Adam
in turn, a learning-rate schedule, validation after each epoch.
"""

import json
import re
from pathlib import Path

import pytest

from hybridpipe.checkpoint.directory import last_good, read_manifest
from hybridpipe.health import exit_report
from hybridpipe.launch import restarts
from tests.mpi.project import write_project

MODEL = """
import os, resource, signal
import torch
from torch import nn

def net(width):
    if "SMALL_FILES" in os.environ and os.environ["OMPI_COMM_WORLD_RANK"] == "1":
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
    first, last = nn.Linear(8, width), nn.Linear(width, 3)
    return nn.Sequential(first, nn.ReLU(), nn.Linear(width, width), nn.Dropout(0.1), last)
"""
SYNCHRONOUS = [
    "2-1-1:gpipe", "1-2-1:1f1b", "2-2x2:interleaved-1f1b", "1-1-1:zero-bubble", "4:1f1b:recompute",
    "1-2-1:1f1b:fp16",
]  # fmt: skip
ASYNCHRONOUS = [
    "1-2-1:pipedream", "1-3:pipedream:vertical", "1-1-1-1:pipedream:limited:recompute", "2-2:pipedream-2bw",
    "1-1-1-1:pipedream:bf16-params", "1-2-1:pipedream:fp16",
    "1-1-1-1:pipedream:spectrain:bf16-params", "1-2-1:pipedream-2bw:xpipe",
]  # fmt: skip


@pytest.mark.timeout(240)  # half a minute alone; on a machine that others use, too, much more
@pytest.mark.parametrize("specs", [SYNCHRONOUS, ASYNCHRONOUS], ids=["synchronous", "asynchronous"])
def test_ten_minibatches_are_five_a_resumption_and_five_bit_for_bit(job, tmp_path, specs):
    """Later checkpoints of both are equal files: weights, versions, optimizer, random states, losses."""
    printed = job(4, "resuming.py", "exact", str(tmp_path), *specs, timeout_seconds=200).stdout
    assert printed.count(": exact\n") == len(specs)


@pytest.mark.timeout(240)
def test_any_plan_goes_on_with_what_any_other_has_saved(job, tmp_path):
    """From the interleaved one, whose ranks hold two stages each, to one stage of all layers, too."""
    specs = [
        "2-2:gpipe", "2:1f1b", "2-2x2:interleaved-1f1b", "1-1-1:zero-bubble", "1-2-1:pipedream",
        "2-1:pipedream-2bw",
    ]  # fmt: skip
    printed = job(4, "resuming.py", "pairs", str(tmp_path), *specs, timeout_seconds=200).stdout
    assert "6 x 6 pairs, adam: equal by name" in printed


@pytest.mark.timeout(240)
def test_a_parameter_of_two_stages_goes_on_wherever_it_is_held(job, tmp_path):
    """Its holders are together or apart, with one replica or several, on one rank or on two."""
    specs = ["1-1:1f1b:tied", "2:1f1b:tied", "1-2-1:gpipe:tied", "1-1x2:interleaved-1f1b:tied"]
    printed = job(4, "resuming.py", "exact", str(tmp_path), *specs[::2], timeout_seconds=200).stdout
    assert printed.count(": exact\n") == 2
    printed = job(4, "resuming.py", "pairs", str(tmp_path), *specs, timeout_seconds=200).stdout
    assert "4 x 4 pairs, adam: equal by name" in printed


@pytest.mark.timeout(240)
def test_a_stream_that_is_stopped_in_its_middle(job, tmp_path):
    """Ranks end with messages under way (and the job with mpirun's code for that), but all at one step."""
    spec = "1-2-1:pipedream"
    stopped = job(4, "resuming.py", "stop", str(tmp_path), spec, fails=True).stdout
    assert len(re.findall(r"stopped at (\d+)\n", stopped)) == 4
    assert "as if it had never been stopped" in job(4, "resuming.py", "rest", str(tmp_path), spec).stdout


@pytest.fixture
def train(job, tmp_path):
    """`hybridpipe train` on two ranks, and where it wrote to."""
    config = write_project(tmp_path, MODEL, more="[checkpoint]\nevery = 5\n")
    out = tmp_path / "out"

    def run(*options: str, ranks: int = 2, **given) -> tuple[str, Path]:
        command = ["hybridpipe", "train", str(config), "--out", str(out), *options]
        return job(ranks, *command, **given).stdout, out

    return run


@pytest.mark.timeout(240)
def test_the_command_goes_on_where_the_last_one_ended(train):
    """Twelve minibatches; the first command ends with eight, its metrics go one further, torn."""
    _, out = train("--plan", "straight", "--set", "train.epochs=2")
    metrics = out / "metrics.jsonl"
    before = metrics.read_text()
    metrics.write_text(before + '{"step": 8, "epoch": 2, "loss"')
    printed, _ = train("--plan", "auto", "--resume", "auto")
    assert f"resuming from {out}/checkpoints/step-00000008: step 8, 0 minibatches into epoch 3" in printed
    assert "with its plan 1-1, 1f1b" in printed
    lines = metrics.read_text().splitlines()
    assert metrics.read_text().startswith(before)
    assert [json.loads(line)["step"] for line in lines] == list(range(12))
    summary = json.loads((out / "summary.json").read_text())
    assert summary["minibatches"] == 12 and [entry["epoch"] for entry in summary["epochs"]] == [0, 1, 2]
    assert summary["loss_first"] == json.loads(lines[0])["loss"]
    assert (read_manifest(last_good(out / "checkpoints")[0]).step) == 12
    printed, _ = train("--plan", "dp")
    assert "was another training's" in printed and (out / "checkpoints.old" / "step-00000012").is_dir()


@pytest.mark.timeout(240)
def test_other_settings_are_refused_and_a_full_disk_told(train, tmp_path):
    """In one line each, and the checkpoint that is there stays. A full disk is no mistake for good."""
    _, out = train("--plan", "straight", "--set", "train.epochs=1")
    options = ["--plan", "dp", "--set", "train.seed=3", "--resume", "auto"]
    printed, _ = train(*options, fails=True)
    refused = f"hybridpipe: {out}/checkpoints/step-00000004: seed: the training has 3, the checkpoint 0\n"
    assert printed.count(refused) == 1
    options = ["--plan", "straight", "--resume", "auto"]
    # On rank 1, which gives the directory up: rank 0, between two files, misses it, and is not to tell that.
    late = "rank=0,point=save-shard-written,kind=delay,seconds=0.5"
    env = {"SMALL_FILES": "1", "HYBRIDPIPE_OUTCOMES": str(tmp_path), "HYBRIDPIPE_FAULT": late}
    printed, _ = train(*options, fails=True, env=env)
    told = re.findall(r"hybridpipe: (\S+): cannot be written: File too large", printed)
    assert len(told) == 1 and Path(told[0]).name in ("stage-001.safetensors", "rank-0001.safetensors"), (
        printed
    )
    (ended,) = exit_report.read(tmp_path)  # rank 1
    assert (ended.rank, ended.code, ended.step) == (1, 1, 5), ended
    again = restarts.attempt(1, [ended], 2, has_begun=True)
    assert restarts.no_restart_reason([again], 2) is None
    assert restarts.no_restart_reason([again, again], 2) == "the same error came at step 5 twice in a row"
    assert read_manifest(last_good(out / "checkpoints")[0]).step == 4
    # Another learning rate: it was read from the checkpoint, whatever the config said.
    other = ["--plan", f"{out}/plan.json", "--resume", "auto"]
    other += ["--set", "plan.predict=false", "--set", "optimizer.args.lr=0.001"]
    printed, _ = train(*other, fails=True)
    line = "optimizer: lr: the training has 0.001, the checkpoint 0.01"
    refused = f"hybridpipe: {out}/checkpoints/step-00000004: {line}; --resume-changed, or trainer.resume("
    assert printed.count(refused) == 1 and "Traceback" not in printed
    printed, _ = train(*other, "--resume-changed")
    assert printed.count(f"hybridpipe: resuming with changed settings: {line}\n") == 1
