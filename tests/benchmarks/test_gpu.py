"""The GPU's benchmark without one: what it says, what it leaves out, and how it gets into its environment."""

import sys
from types import SimpleNamespace

import bootstrap
import pytest
import run
import torch
from cases import gpu
from jobs import Run
from results import Row


def asked(tmp_path, *words: str) -> Run:
    return Run(tmp_path, 0, run.parse(["gpu", *words]))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_line(tmp_path):
    with pytest.raises(SystemExit) as ended:
        next(gpu.measure(asked(tmp_path)))
    assert str(ended.value).startswith("gpu: no GPU here") and "\n" not in str(ended.value)


def test_what_would_take_too_long_is_left_out_and_named(tmp_path, monkeypatch):
    now = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(gpu.time, "monotonic", lambda: now.seconds)

    def rows():
        for i in range(5):
            now.seconds += 100
            yield Row(gpu.TESTS, str(i), 0, {"seconds": 100.0})

    clock = gpu.Clock(end=200 + gpu.PARTS_SECONDS[gpu.TESTS])
    found = list(gpu._in_time(asked(tmp_path), gpu.TESTS, clock, rows()))
    assert [row.way for row in found] == ["0", "1", "2", "the rest"]
    assert found[-1].error == "left out: no time"
    assert list(gpu._in_time(asked(tmp_path, "--only", "staging"), gpu.TESTS, clock, rows())) == []


def test_the_report_has_a_table_for_each_part():
    trained = {"seconds": 0.2, "loss": 4.5, "plan": "one process", "memory": 2**30}
    rows = [
        Row(gpu.COST, gpu.ONE, 0, trained),
        Row(gpu.COST, "plan 1-1", 0, trained | {"seconds": 0.4, "plan": "1-1, 1f1b, 8", "predicted": 0.3}),
        Row(gpu.STAGING, "16 MiB", 0, {"out": 2e10, "in": 1e10, "both": 3e10, "hidden": 0.9}),
        Row(gpu.TESTS, "exact", 0, {"seconds": 30.0, "plans": 12}),
        Row(gpu.TESTS, "low", 0, {"seconds": 9.0, "plans": 2}, error="failed: AssertionError: 1-1"),
        Row(gpu.CORES, "the rest", 0, error="left out: no time"),
    ]
    text = gpu.report(rows)
    for line in ("plan 1-1 (1-1, 1f1b, 8) | 400.0", "| 0.50 ", "300.0", "-25%", "1,024", "20.0", "90%"):
        assert line in text
    assert "as one process" in text and "tests, low: failed: AssertionError: 1-1" in text
    assert "cores, the rest: left out: no time" in text


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
