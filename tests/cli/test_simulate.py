"""Simulate: what it prints for people, and on machines that are not there."""

import re
from dataclasses import replace

import pytest

from hybridpipe.cli.main import main
from hybridpipe.files import write_json
from hybridpipe.planning.cluster import Cluster
from hybridpipe.planning.plan import Plan, StageSpec
from hybridpipe.planning.profile import LayerProfile, ModelProfile

# Two layers whose gradients are 400 MB, on a machine of four ranks that share two cores.
LAYERS = tuple(LayerProfile(name, 0.1, 0.2, 200_000_000, 1000, 0) for name in "ab")
MACHINE = replace(Cluster.flat(4, 1e10, 1e-5), node_ranks=4, compute_speeds=(1.0, 1.0, 2 / 3, 0.5))


@pytest.fixture
def arguments(tmp_path):
    """The words of `simulate` for the plan 1-1 on that machine."""
    plan = Plan((StageSpec(0, 1), StageSpec(1, 2)), num_microbatches=4)
    for name, document in {"plan": plan, "profile": ModelProfile(LAYERS, 2), "cluster": MACHINE}.items():
        write_json(tmp_path / f"{name}.json", document)
    files = (f"--{name}={tmp_path / name}.json" for name in ("plan", "profile", "cluster"))
    return ["simulate", *files]


def test_a_plan_is_told_with_its_timeline(arguments, capsys):
    assert main(arguments) == 0
    first, second, empty, *timeline = capsys.readouterr().out.splitlines()
    assert first == "plan 1-1: 2 stages on 2 of 4 ranks, 1f1b, 4 microbatches of 2 samples"
    assert second.startswith(
        "predicted: 1.5 s a minibatch of 8 samples, 5 samples/s; bubble 20%; 1.60 times as"
    )
    assert empty == "" and len(timeline) >= 2


@pytest.mark.parametrize("rate, stages", [("1Gbit", 2), ("1TB", 1)])
def test_one_machine_becomes_four_with_a_network_between_them(arguments, tmp_path, capsys, rate, stages):
    picture = tmp_path / "timeline.svg"
    assert main([*arguments, "--ranks", "16", "--bandwidth", rate, "--plot", str(picture)]) == 0
    *table, told, speed, where = capsys.readouterr().out.splitlines()
    assert re.fullmatch(
        rf"plan .*: {stages} stages? on \d+ of 16 ranks, 1f1b, 16 microbatches of 2 samples", told
    )
    assert table[0].split() == ["before", "after"]
    if stages == 1:
        assert speed.endswith("; it is data parallelism")
    else:
        times = re.search(r"([\d.]+) times as fast as data parallelism on (?:the same|all 16) ranks$", speed)
        assert float(times[1]) > 1
    assert where == f"timeline: {picture}" and picture.read_text().startswith("<svg")


@pytest.mark.parametrize(
    "words, told",
    [
        (["--minibatch", "8"], "^hybridpipe simulate: .* arguments: --minibatch 8 .*simulate --help"),
        (["--bandwith=1GB"], r"did you mean '--bandwidth'\?"),
        (["more"], r"unrecognized arguments: more; see hybridpipe simulate --help"),
    ],
)
def test_an_unknown_option_points_to_the_commands_own(arguments, capsys, words, told):
    """It pointed to `hybridpipe --help`, which has no options of a command."""
    with pytest.raises(SystemExit) as left:
        main([*arguments, *words])
    (line,) = capsys.readouterr().err.splitlines()
    assert left.value.code == 2 and re.search(told, line)


@pytest.mark.parametrize(
    "words, told",
    [
        (["simulat"], r"invalid choice: 'simulat' \(did you mean 'simulate'\?"),
        (["plan", "--schedule", "1fb1"], r"'1fb1' \(did you mean '1f1b'"),
    ],
)
def test_of_an_unknown_word_is_told_what_was_meant(capsys, words, told):
    with pytest.raises(SystemExit):
        main(words)
    assert re.search(told, capsys.readouterr().err)


def test_without_its_bandwidth_there_is_no_network(arguments, capsys):
    assert main([*arguments, "--ranks", "16"]) == 2
    assert "a second needs a network: give its bandwidth" in capsys.readouterr().err
