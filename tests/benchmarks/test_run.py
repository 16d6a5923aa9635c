"""The runner: it finds every benchmark, measures what is asked for, and counts on where it was."""

import json

import pytest
import run
from jobs import Run
from results import Row


@pytest.mark.parametrize("name", run.names())
def test_a_benchmark_has_its_line_and_its_options(name):
    (line,) = [line for line in run.listing().splitlines() if line.split()[0] == name]
    assert len(line) > 30 and len(line) <= 110
    options = run.parse([name, "--only", "a", "--rounds", "2"])
    assert (options.name, options.only, options.rounds) == (name, ["a"], 2)
    module = run.case(name)
    assert callable(module.measure) and callable(module.report)


def test_an_unknown_benchmark_is_refused(capsys):
    with pytest.raises(SystemExit) as ended:
        run.main(["nope"])
    assert ended.value.code == 2 and "invalid choice: 'nope'" in capsys.readouterr().err


def test_only_takes_what_every_pattern_matches(tmp_path):
    asked = Run(tmp_path, 0, run.parse(["peers", "--only", "^mlp", "--only", "ours"]))
    assert asked.wants("mlp", "ours, dp")
    assert not asked.wants("gpt", "ours, dp") and not asked.wants("mlp", "torch DDP")


@pytest.fixture
def two_ways(monkeypatch):
    """A benchmark whose seconds are the number of the round, and one more."""

    class Case:
        def measure(asked):
            for way in ("a", "b"):
                if asked.wants("all", way):
                    yield Row("all", way, asked.round, {"seconds": asked.round + 1.0})

        def report(rows):
            return f"{len(rows)} rows"

    monkeypatch.setattr(run, "case", lambda _: Case)


def test_rounds_of_earlier_calls_count_on(two_ways, tmp_path, capsys):
    run.main(["planner", "--rounds", "2", "--out", str(tmp_path)])
    run.main(["planner", "--only", ": b", "--out", str(tmp_path)])
    found = json.loads((tmp_path / "planner.json").read_text())
    assert [(row["way"], row["round"]) for row in found["rows"]] == [
        ("a", 0),
        ("b", 0),
        ("a", 1),
        ("b", 1),
        ("b", 2),
    ]
    assert [each["command"] for each in found["runs"]] == [
        f"python benchmarks/run.py planner --rounds 2 --out {tmp_path}",
        f"python benchmarks/run.py planner --only ': b' --out {tmp_path}",
    ]
    table = (tmp_path / "planner.md").read_text()
    assert table.startswith("5 rows\n") and found["runs"][0]["date"] in table
    assert found["runs"][0]["commit"] in table


def test_no_rounds_report_on_what_is_there(two_ways, tmp_path, capsys):
    with pytest.raises(SystemExit, match="nothing was measured"):
        run.main(["planner", "--rounds", "0", "--out", str(tmp_path)])
    run.main(["planner", "--out", str(tmp_path)])
    before = (tmp_path / "planner.json").read_text()
    run.main(["planner", "--rounds", "0", "--out", str(tmp_path)])
    assert (tmp_path / "planner.json").read_text() == before
