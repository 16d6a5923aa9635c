"""The GPU's benchmark without one: what it says, what it leaves out, and how it gets into its environment."""

import re
import sys
from functools import partial
from types import SimpleNamespace

import bootstrap
import pytest
import run
import torch
from cases import gpu
from jobs import Run
from results import Row

from hybridpipe.report.rank_time import TRACED


def asked(tmp_path, *words: str) -> Run:
    return Run(tmp_path, 0, run.parse(["gpu", *words]))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_line(tmp_path):
    with pytest.raises(SystemExit) as ended:
        next(gpu.measure(asked(tmp_path)))
    assert str(ended.value).startswith("gpu: no GPU here") and "\n" not in str(ended.value)


def test_what_would_take_too_long_is_left_out_and_named(monkeypatch):
    now = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(gpu.time, "monotonic", lambda: now.seconds)

    def job(name: int):
        now.seconds += 100
        yield Row(gpu.TESTS, str(name), 0, {"plans": 1})

    work = [partial(job, name) for name in range(5)]
    part = gpu.Part(gpu.TESTS, seconds=90)
    found = list(gpu._in_time(part, 0, 290, work))
    assert [(row.way, row["took"]) for row in found] == [
        ("0", 100),
        ("1", 100),
        ("2", 100),
        ("the rest", None),
    ]
    assert found[-1].error == "left out: no time"
    now.seconds = 0.0
    assert [row.way for row in gpu._in_time(part, 0, 290, work[:3])] == ["0", "1", "2"]  # none is left


def started_ways(monkeypatch, asked: Run, **changes) -> list[tuple[str, str, int, float]]:
    """Measure without jobs: the part, way, ranks and limit of each job that would be started."""
    found = []

    def start(way, task, part, number, out, *, limit_seconds, **_):
        found.append((part, way.name, way.ranks, limit_seconds))
        return Row(part, way.name, number, {"seconds": 1.0})

    monkeypatch.setattr(gpu.jobs, "start", start)
    for name, value in changes.items():
        monkeypatch.setattr(gpu.os, name, value)
    list(gpu.measure(asked))
    return found


def test_a_part_is_called_by_itself_with_its_plain_loop(tmp_path, monkeypatch):
    chosen = asked(tmp_path, "--rehearse", "--only", "^gpt in bf16: auto")
    assert started_ways(monkeypatch, chosen) == [
        (gpu.COST, gpu.ONE, 1, 60),
        (gpu.COST, "auto, 2 ranks", 2, 60),
        (gpu.COST, "auto, 4 ranks", 4, 60),
    ]


@pytest.mark.parametrize("cores, ranks", [(16, 8), (2, 2)])
def test_each_model_is_trained_on_the_cores_before_the_next(cores, ranks, tmp_path, monkeypatch):
    chosen = asked(tmp_path, "--rehearse", "--only", "^cores")
    found = started_ways(monkeypatch, chosen, cpu_count=lambda: cores)
    assert [part for part, *_ in found] == [f"cores, {m}" for m in ("gpt", "vgg", "mlp") for _ in range(6)]
    assert [used for _, _, used, _ in found] == [1, *[ranks] * 5] * 3


def test_without_its_package_a_part_says_so_in_one_line_and_others_go_on(tmp_path, monkeypatch):
    monkeypatch.setattr(
        gpu.importlib.util, "find_spec", lambda name: None if name == "transformers" else name
    )
    monkeypatch.setattr(
        gpu.jobs, "start", lambda way, task, part, number, *_, **__: Row(part, way.name, number)
    )
    rows = list(gpu.measure(asked(tmp_path, "--rehearse", "--only", "gpt-2 tied|cores, mlp")))
    missing = [
        "gpt-2 tied, fp32, all: transformers is not installed",
        "gpt-2 tied, bf16, all: transformers is not installed",
    ]
    assert [f"{row.group}, {row.way}: {row.error}" for row in rows[:2]] == missing
    assert [row.group for row in rows[2:]] == ["cores, mlp"] * 6


def test_the_report_has_a_table_for_each_kind_of_figure():
    trained = {"seconds": 0.2, "loss": 4.5, "plan": "one process", "memory": {"measured": [2**30]}}
    memory = {"measured": [3 * 2**29, 2**29], "predicted": [2**30, 2**29]}
    parts = {rank: dict.fromkeys(TRACED, 0.0125) for rank in ("0", "1")}
    under = {
        "plan": "1-1, 1f1b, 8",
        "seconds": 0.4,
        "predicted": 0.3,
        "memory": memory,
        "rank_seconds": parts,
    }
    rows = [
        Row(gpu.COST, gpu.ONE, 0, trained | {"took": 20.0}),
        Row(gpu.COST, "plan 1-1", 0, trained | under | {"took": 30.0}),
        Row("cores, gpt", gpu.ONE, 0, {"seconds": 0.5, "loss": 4.0}),
        Row("cores, gpt", "ours, dp", 0, {"seconds": 0.25, "loss": 4.1}),
        Row("cores, gpt", gpu.PIPEDREAM, 0, {"seconds": 0.125, "loss": 4.2}),
        Row(gpu.STAGING, "16 MiB", 0, {"out": 2e10, "in": 1e10, "both": 3e10, "hidden": 0.9}),
        Row(gpu.TESTS, "exact", 0, {"plans": 12}),
        Row(gpu.TESTS, "low", 0, {"plans": 2}, error="failed: AssertionError: 1-1"),
        Row("cores, vgg", "the rest", 0, error="left out: no time"),
    ]
    lines = [re.sub(" +", " ", line) for line in gpu.report(rows).splitlines()]
    for line in (
        "| gpt in bf16 | plan 1-1 (1-1, 1f1b, 8) | 400.0 | 0.50 | 300.0 | -25% | 4.5000 |",
        "| gpt in bf16 | plan 1-1 | 0 | 1,024 | 1,536 | 1.50 |",
        "| gpt in bf16 | one process | 0 | – | 1,024 | – |",
        "| 16 MiB | 20.0 | 10.0 | 30.0 | 90% |",
        "| exact | 12 | as one process |",
        "| low | 2 | failed |",
        "| gpt in bf16 | 2 | 50 | 30 |",
        "another loss: cores, gpt, ours, dp: 4.100000 instead of 4.000000",
        "tests, low: failed: AssertionError: 1-1",
        "cores, vgg, the rest: left out: no time",
    ):
        assert line in lines
    assert sum("12.5" in line for line in lines) == 2  # the parts of two ranks' minibatches
    assert not any(gpu.PIPEDREAM in line for line in lines if line.startswith("another loss"))


@pytest.fixture
def started(monkeypatch):
    """What would be run in place of this program."""
    found = []
    monkeypatch.setattr(bootstrap.os, "execv", lambda *words: found.append(words))
    return found


def test_an_environment_that_is_there_is_taken(monkeypatch, started):
    monkeypatch.setattr(bootstrap, "missing", list)
    monkeypatch.setattr(bootstrap.subprocess, "run", lambda *_, **__: pytest.fail("nothing is to be set up"))
    bootstrap.enter(["gpu", "--from", "bundle"])
    assert started == []


def test_a_bundle_is_set_up_and_the_program_started_again(monkeypatch, started, capfd):
    calls = []

    def setup(words, **_):
        calls.append(words)
        return SimpleNamespace(returncode=0, stdout="/env/bin/python\n")

    monkeypatch.setattr(bootstrap, "missing", lambda: ["horovod"])
    monkeypatch.setattr(bootstrap.subprocess, "run", setup)
    monkeypatch.setattr(sys, "argv", ["run.py", "gpu", "--from", "bundle"])
    bootstrap.enter(["gpu", "--from", "bundle"])
    assert calls[0][0].endswith("launch/setup") and calls[0][-2:] == ["--from", "bundle"]
    assert started == [("/env/bin/python", ["/env/bin/python", "run.py", "gpu", "--from", "bundle"])]
    assert "horovod missing" in capfd.readouterr().err


def test_a_set_up_that_fails_ends_it(monkeypatch, started):
    monkeypatch.setattr(bootstrap, "missing", lambda: ["horovod"])
    failed = SimpleNamespace(returncode=3, stdout="")
    monkeypatch.setattr(bootstrap.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(SystemExit, match="set-up failed, exit code 3"):
        bootstrap.enter(["gpu", "--from", "bundle"])
    bootstrap.enter(["gpu"])  # without a bundle nothing is set up
    assert started == []
