"""The commands as a user types them, on a small model; what they write is what the next one reads."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hybridpipe.files import read_cluster, read_json, read_plan, read_profile
from hybridpipe.run_folder.data import RUN_FORMAT, RunStart
from tests.mpi.project import write_project
from tests.report.pages import Tree

MODEL = """
import torch
from torch import nn

def net(width):
    first, last = nn.Linear(8, width), nn.Linear(width, 3)
    return nn.Sequential(first, nn.ReLU(), nn.Linear(width, width), nn.ReLU(), last)
"""
SUMMARY = {  # DESIGN's list
    "plan", "ranks", "samples_per_second", "minibatch_seconds_median", "predicted_minibatch_seconds",
    "bubble_fraction", "loss_first", "loss_last", "metrics", "peak_memory_bytes", "bytes_sent_p2p",
    "bytes_allreduced",
}  # fmt: skip


# A command line, then what it is told; the files are made by the test.
MISTAKES = [
    line.strip()
    for line in """
train none.toml
    none.toml: cannot be read
train small.toml --plan best
    --plan: must be auto, dp, straight or a .json file, got 'best'
train small.toml --plan none.json
    none.json: cannot be read
train small.toml --cluster none.json
    none.json: cannot be read
train small.toml --plan broken.json
    broken.json: must be JSON
train small.toml --plan gap.json
    gap.json: stages[1].start: must be 1
train small.toml --plan extra.json
    extra.json: stages[0].replica: unknown field (did you mean 'replicas'?
train small.toml --plan schedule.json
    schedule.json: schedule: must be one of 1f1b, gpipe, interleaved-1f1b, zero-bubble, zb-v,
train small.toml --plan huge.json
    huge.json: stages[0].replicas: must be an integer <= 1048576
train small.toml --resume-changed
    --resume-changed goes with --resume auto or --resume PATH
train small.toml --set train.minibatch=0
    train.minibatch: must be an integer >= 1, got 0
train small.toml --set train.minibatch=2
    train.microbatch: must be <= minibatch = 2, got 4
train small.toml --set train.epoch=2
    train.epoch: unknown field (did you mean 'epochs'?
train small.toml --set epochs
    --set epochs: must be table.key=value
train small.toml --set model.factory=small
    model.factory: must be 'module:callable', got 'small'
train small.toml --set model.factory=small:nett
    small has no 'nett' (did you mean 'net'?
train small.toml --set model.factory=smal:net
    model.factory: no module 'smal'
train small.toml --set model.args.widht=3
    model.args: net() got an unexpected keyword argument 'widht'
train small.toml --set optimizer.args.lrr=3
    did you mean 'lr'?
train small.toml --set plan.schedule=2f2b
    plan.schedule: must be one of auto, 1f1b, gpipe, interleaved-1f1b, zero-bubble, zb-v,
plan --profile negative.json --cluster c.json
    layers[0].forward_seconds: must be a finite number >= 0, got -1
plan --profile p.json --cluster gap.json
    gap.json: format: must be 'hybridpipe-cluster/1', got 'hybridpipe-plan/1'
plan --profile p.json --cluster c.json --ranks 9
    ranks must be at most the cluster's 4, got 9
plan --profile p.json --cluster c.json --memory 10
    no plan fits into memory: 1 comes closest and needs
plan --profile p.json --cluster c.json --ranks 0
    --ranks: must be an integer >= 1, got '0'
simulate --plan six.json --profile p.json --cluster c.json
    plan needs 6 = 6 ranks, got 4
probe --flat 4 --bandwidth -1
    --bandwidth: must be such as 100Gbit, 12.5GB or 1.25e10 bytes per second, got '-1'
compare small.toml --ranks 2 --baselines nccl
    baseline_nccl.py must exist, but is missing
compare small.toml
    --ranks
""".strip().splitlines()
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_project(tmp_path, MODEL)
    return tmp_path


@pytest.fixture
def for_the_group() -> Iterator[None]:
    """A umask that lets the user's group read, and nobody else."""
    before = os.umask(0o027)
    yield
    os.umask(before)


def hybridpipe(*arguments: object, cwd: Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "hybridpipe", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=110)


def test_from_measurement_to_trained_model(job, folder):
    assert hybridpipe("profile", "small.toml", "--out", "profile.json", cwd=folder).returncode == 0
    profile = read_profile(folder / "profile.json")
    assert profile.num_layers == 5 and profile.samples == 4
    job(4, "hybridpipe", "probe", "--out", str(folder / "cluster.json"))
    cluster = read_cluster(folder / "cluster.json")
    assert cluster.num_ranks == 4 and cluster.levels[0].name == "host"

    planned = hybridpipe(
        "plan", "--profile", "profile.json", "--cluster", "cluster.json", "--minibatch", 16, "--json",
        "--out", "plan.json", cwd=folder,
    )  # fmt: skip
    plan = read_plan(folder / "plan.json")
    assert json.loads(planned.stdout)["num_microbatches"] == plan.num_microbatches == 4

    simulated = hybridpipe(
        "simulate", "--plan", "plan.json", "--profile", "profile.json", "--cluster", "cluster.json",
        "--trace", "trace.json", "--plot", "plot.svg", "--json", cwd=folder,
    )  # fmt: skip
    assert json.loads(simulated.stdout)["minibatch_seconds"] == plan.predicted.minibatch_seconds
    assert (folder / "plot.svg").read_text().startswith("<svg")

    out = folder / "out"
    done = job(
        4,
        "hybridpipe",
        "train",
        str(folder / "small.toml"),
        "--plan",
        str(folder / "plan.json"),
        "--set",
        "plan.predict=true",
        "--out",
        str(out),
    )
    summary = json.loads((out / "summary.json").read_text())
    assert summary.keys() >= SUMMARY
    assert summary["loss_last"] < summary["loss_first"] and summary["ranks"] == 4
    assert len((out / "metrics.jsonl").read_text().splitlines()) == summary["minibatches"] == 3 * 4
    run = read_plan(out / "plan.json")
    assert run.stages == plan.stages and run.predicted  # anew, from what this job has measured
    assert all(part["predicted"] >= 0 <= part["measured"] for part in summary["parts"].values())
    seconds = sum(part["predicted"] for part in summary["parts"].values())
    assert seconds == pytest.approx(summary["predicted_minibatch_seconds"])
    assert "measured" in done.stdout.split("minibatch 12/12")[1]
    assert (out / "model.safetensors").stat().st_size > 0
    assert "minibatch 12/12" in done.stdout


def test_auto_explains_itself_and_both_timelines_are_kept(job, folder, for_the_group):
    out = folder / "out"
    train = ["hybridpipe", "train", str(folder / "small.toml"), "--set", "train.epochs=1", "--out", str(out)]
    done = job(3, *train)
    for said in ("plan ", "all-reduce", "considered, by predicted time", "dp", "straight"):
        assert said in done.stdout
    for said in ("3 ranks on ", "measuring the model\n", "measuring the machines\n", "minibatch 4/4: loss "):
        assert done.stdout.count(said) == 1, done.stdout
    events = json.loads((out / "trace.json").read_text())["traceEvents"]
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} == {
        "measured",
        "predicted",
    }
    assert {"B0", "step"} <= {event["name"] for event in events if event["ph"] == "X" and event["pid"] == 0}

    start = read_json(out / "run.json", RunStart, RUN_FORMAT)
    assert (start.title, start.plan_source, start.measured) == ("small", "auto", True)
    assert len(start.hosts) == len(start.num_cores) == 3 and start.candidates
    assert start.settings["train"] == {"minibatch": 16, "microbatch": 4, "epochs": 1}
    assert done.stdout.rstrip().endswith(f"written to {out}, with report.html")
    text = Tree((out / "report.html").read_text()).text
    for told in ("Plan, and why", "Loss", "Predicted", "Measured", "Median minibatch of each rank", "rank 2"):
        assert told.lower() in text.lower(), told
    assert "Not in this report" not in text
    made = {out, *out.rglob("*")}
    assert len(made) > 15 and {each.stat().st_mode & 0o777 for each in made if each.is_file()} == {0o640}
    assert {each.stat().st_mode & 0o777 for each in made if each.is_dir()} == {0o750}

    again = job(3, *train, "--resume", "auto").stdout
    told = f"machines as measured before (remove {out / 'machines.json'} to measure them anew)\n"
    assert again.count(told) == again.count(", as before\n") == 1 and "considered" not in again, again
    measured, used = (json.loads((out / f"{name}.json").read_text()) for name in ("machines", "cluster"))
    assert measured["cluster"].items() <= used.items(), "the plan was predicted with it"


def test_machines_measured_before_are_not_measured_again(job, folder):
    """But where there are not as many ranks as then, as after a restart with fewer."""
    assert hybridpipe("probe", "--flat", 2, "--out", "cluster.json", cwd=folder).returncode == 0
    given, settings = str(folder / "cluster.json"), ["--set", "train.epochs=1", "--cluster"]
    told = "the given cluster has 2 ranks, and there are 3: the machines are measured now\n"
    for ranks, are_known in ((2, True), (3, False)):
        out = folder / f"out{ranks}"
        done = job(
            ranks, "hybridpipe", "train", str(folder / "small.toml"), *settings, given, "--out", str(out)
        )
        assert (read_cluster(out / "cluster.json") == read_cluster(given)) is are_known
        assert done.stdout.count(told) == (not are_known), done.stdout


def test_what_zero_bubble_cannot_split_is_told_once(job, folder):
    source = folder / "small.py"
    source.write_text(source.read_text().replace("nn.ReLU()", "nn.PReLU()"))
    settings = ["--set", "train.epochs=1", "--set", "plan.schedule=zero-bubble"]
    plan = ["--plan", "straight", "--out", str(folder / "out")]
    done = job(2, "hybridpipe", "train", str(folder / "small.toml"), *settings, *plan)
    assert done.stdout.count("zero-bubble: backward not split in ") == 1
    assert "backward not split in 1 (PReLU), 3 (PReLU)\n" in done.stdout


def test_compare_puts_runs_side_by_side(folder):
    done = hybridpipe(
        "compare", "small.toml", "--ranks", 2, "--plans", "dp,straight", "--set", "train.epochs=1",
        "--rounds", 2, "--out", "out", cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    runs = json.loads((folder / "out" / "compare.json").read_text())["runs"]
    assert runs["dp"]["plan"] == "2" and runs["straight"]["plan"] == "1-1"
    assert runs["dp"]["loss_last"] == pytest.approx(runs["straight"]["loss_last"], abs=1e-5)
    assert runs["dp"]["bytes_sent_p2p"] == 0 < runs["dp"]["bytes_allreduced"]
    assert runs["straight"]["bytes_allreduced"] == 0 < runs["straight"]["bytes_sent_p2p"]
    assert "round 2 of 2" in done.stdout and "vs dp" in done.stdout


@pytest.mark.parametrize("arguments, told", list(zip(MISTAKES[::2], MISTAKES[1::2])))
def test_a_mistake_is_told_in_one_line_before_anything_starts(folder, arguments, told):
    plan = {"format": "hybridpipe-plan/1", "stages": [{"start": 0, "stop": 1, "replicas": 1}]}
    layer = {
        "name": "a",
        "forward_seconds": 1,
        "backward_seconds": 2,
        "parameter_bytes": 3,
        "output_bytes": 4,
        "activation_bytes": 5,
    }
    profile = {"format": "hybridpipe-profile/1", "samples": 2, "layers": [layer]}
    levels = [{"name": "network", "ranks": 4, "bandwidth": 1e9, "latency_seconds": 0}]
    for name, document in {
        "gap.json": plan | {"stages": [*plan["stages"], {"start": 2, "stop": 5, "replicas": 1}]},
        "extra.json": plan | {"stages": [{"start": 0, "stop": 5, "replica": 1}]},
        "schedule.json": plan | {"schedule": "pipedream2"},
        "huge.json": plan | {"stages": [{"start": 0, "stop": 5, "replicas": 10**12}]},
        "six.json": plan | {"stages": [{"start": 0, "stop": 1, "replicas": 6}]},
        "p.json": profile,
        "negative.json": profile | {"layers": [layer | {"forward_seconds": -1}]},
        "c.json": {"format": "hybridpipe-cluster/1", "levels": levels},
    }.items():
        (folder / name).write_text(json.dumps(document))
    (folder / "broken.json").write_text("{")
    before = {path.name for path in folder.iterdir()}
    done = hybridpipe(*arguments.split(), cwd=folder)
    assert done.returncode == 2, done.stdout + done.stderr
    assert told in done.stderr
    assert done.stderr.count("\n") == 1 and done.stdout == "", done.stderr
    assert {path.name for path in folder.iterdir()} - before <= {"__pycache__"}, "nothing is half-written"


@pytest.mark.parametrize(
    "arguments, told",
    [
        (["--set", "train.epoch=2"], "train.epoch: unknown field"),
        (["--plan", "five.json"], "plan needs 5 = 5 ranks, got 2"),
        (["--plan", "layers.json"], "the plan cuts num_layers = 4, the model has 5 layers"),
    ],
)
def test_on_several_ranks_a_mistake_is_told_once(job, folder, arguments, told):
    for name, stop, replicas in (("five.json", 5, 5), ("layers.json", 4, 2)):
        stages = [{"start": 0, "stop": stop, "replicas": replicas}]
        (folder / name).write_text(
            json.dumps({"format": "hybridpipe-plan/1", "num_microbatches": 4, "stages": stages})
        )
    located = [str(folder / word) if word.endswith(".json") else word for word in arguments]
    done = job(2, "hybridpipe", "train", str(folder / "small.toml"), *located, fails=True)
    assert done.returncode == 2, done.stdout
    assert done.stdout.count(told) == 1, done.stdout
    assert "Traceback" not in done.stdout
