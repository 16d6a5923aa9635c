import json
import re
from dataclasses import replace

import pytest

from hybridpipe.cli.main import main
from hybridpipe.files import read_plan, write_json
from hybridpipe.planning.cluster import Cluster, Level
from hybridpipe.planning.plan import Plan, StageSpec
from hybridpipe.planning.profile import LayerProfile, Measurement, ModelProfile, SharedParameter
from hybridpipe.planning.search.search import with_prediction
from hybridpipe.report.tables import (
    candidate_rows,
    compare_table,
    explain,
    stage_rows,
    table,
)
from tests.planning.helpers import search


def layer(name="layer", forward=1.0, backward=2.0, parameters=0, output=0, update=0.0, gradient=None):
    return LayerProfile(name, forward, backward, parameters, output, 0, update, gradient)


FREE = Cluster.flat(4, 1e300, 0.0)
CHAIN = ModelProfile((layer("a", output=100, gradient=40), layer("b", parameters=50), layer("c")), samples=2)


def told(plan, profile, cluster, **asked):
    plan = with_prediction(plan, profile, cluster)
    found = search(profile, cluster, plan.num_microbatches, schedule=plan.schedule)
    return explain(plan, found, profile, cluster, **asked)


def test_a_plan_is_explained():
    text = told(Plan((StageSpec(0, 1), StageSpec(1, 3, 2)), num_microbatches=8), CHAIN, FREE)
    lines = text.splitlines()
    assert lines[:5] == [
        "plan 1-2: 2 stages on 3 of 4 ranks, 1f1b, 8 microbatches of 2 samples",
        "predicted: 30 s a minibatch of 16 samples, 1 samples/s",
        "2.40 times as fast as one rank; 0.90 times as fast as data parallelism on the same ranks; "
        "0.60 times as fast as data parallelism on all 4 ranks",
        "1 rank stays unused (3)",
        "",
    ]
    assert "bottleneck: computing in stage 0, 24 s of 30 s" in lines
    assert any(line.startswith("the ranks' time by prediction, on average: forward 27%, ") for line in lines)
    assert "considered, by predicted time:" in lines
    assert "cannot be trained" not in text


def test_no_stage_computes_longer_than_the_minibatch_takes():
    """Three ranks on one core: with all of them at work stage 0 would compute for three times as long."""
    shared = Cluster.flat(3, 1e9, latency_seconds=0.0)
    shared = replace(shared, node_ranks=3, compute_speeds=(1.0, 0.5, 1 / 3))
    text = told(Plan((StageSpec(0, 2), StageSpec(2, 3)), num_microbatches=2), CHAIN, shared)
    (line,) = (line for line in text.splitlines() if line.startswith("bottleneck: computing in stage 0"))
    part, whole = re.search(r", (\S+) s of (\S+) s", line).groups()
    assert float(part) <= float(whole)


def test_why_ranks_stay_unused():
    slow = Cluster.flat(4, 1e9, latency_seconds=1.0)
    candidates = search(CHAIN, slow, 2)
    best, losing = (
        candidates[0].plan,
        next(c for c in candidates if c.plan.num_ranks > candidates[0].plan.num_ranks),
    )
    text = explain(best, candidates, CHAIN, slow)
    loss = losing.seconds / candidates[0].seconds - 1
    assert f"the best plan with more, {losing.plan.name} on {losing.plan.num_ranks}, loses {loss:.1%}" in text
    assert "unused" not in explain(best, candidates, CHAIN, slow, num_ranks=best.num_ranks)


def test_a_stage_is_described():
    plan = Plan((StageSpec(0, 1), StageSpec(1, 3)), num_microbatches=8)
    limited = replace(FREE, memory_bytes=(10**6, 10**6, 1, 1))
    header, _, first, second = table(stage_rows(plan, CHAIN, limited)).splitlines()
    assert header.startswith("stage ") and header.endswith(" memory")
    assert first.split()[:9] == ["0", "a", "0", "3", "s", "100", "B", "40", "B"]
    assert "b .. c (2)" in second and first.endswith("of 1 MB")


def test_many_ranks_and_stages_stay_on_the_line():
    profile = ModelProfile(tuple(layer(str(i)) for i in range(30)), 1)
    plan = Plan(tuple(StageSpec(i, i + 1) for i in range(30)), num_microbatches=30)
    text = told(plan, profile, Cluster.flat(30, 1e300, 0.0))
    assert "plan 30 stages: 30 stages on 30 of 30 ranks" in text and "0, 1, 2, 3, 4, 5, 6, .., 28" in text
    odd = Plan((StageSpec(0, 30, 10, tuple(range(0, 20, 2))),))
    assert "0,2,4,6,8,10,12,..,18" in table(stage_rows(odd, profile, Cluster.flat(30, 1e300, 0.0)))
    assert "0-9 " in table(stage_rows(Plan.data_parallel(30, 10, 1), profile, Cluster.flat(30, 1e300, 0.0)))


def test_what_does_not_fit_is_said_of_the_others():
    profile = ModelProfile((layer(parameters=100), layer(parameters=100)), 1)
    text = told(Plan((StageSpec(0, 1), StageSpec(1, 2))), profile, replace(FREE, memory_bytes=250))
    assert "as fast as one rank, which does not fit into memory" in text
    assert "2 ranks stay unused (2-3): no plan with more that fits into memory is among the best" in text


def test_a_given_plan_is_explained_without_candidates():
    text = explain(with_prediction(Plan.data_parallel(3, 2, 4), CHAIN, FREE), (), CHAIN, FREE)
    assert "considered" not in text and "bottleneck: " in text


def test_candidates_that_recompute_are_marked():
    layers = tuple(replace(each, activation_bytes=100) for each in CHAIN.layers)
    profile, limited = replace(CHAIN, layers=layers), replace(FREE, memory_bytes=350)
    candidates = search(profile, limited, 8, recompute=True)
    text = table(candidate_rows(candidates, candidates[0].plan))
    assert "straight, recomputing" in text and text.count("->") == 1
    text = explain(candidates[0].plan, candidates, profile, limited)
    assert "activations recomputed in stage 0" in text and "recomputing" in text


def test_an_asynchronous_plan_is_explained():
    text = told(Plan.data_parallel(3, 2, 1, "pipedream"), CHAIN, FREE)
    assert "2 of 4 ranks, pipedream, whole minibatches of 2 samples" in text
    assert "one update every 2 minibatches" in text
    buffered = told(Plan.data_parallel(3, 2, 4, "pipedream-2bw"), CHAIN, FREE)
    assert "pipedream-2bw, 4 microbatches of 2 samples, weights one update old" in buffered
    assert "in flight    versions" in text and "versions" not in told(
        Plan.data_parallel(3, 2, 4), CHAIN, FREE
    )
    synced = Plan((StageSpec(0, 1), StageSpec(1, 3)), "pipedream", vertical_sync=True, max_in_flight=1)
    text = told(synced, CHAIN, FREE)
    assert "stale weights: those of the input stage, at most 1 in flight" in text
    predicting = Plan((StageSpec(0, 1), StageSpec(1, 3)), "pipedream", prediction="xpipe")
    assert "stale weights: each stage's newest, weights predicted (xpipe)" in told(predicting, CHAIN, FREE)


def test_zero_bubbles_numbers_are_told():
    made = Plan((StageSpec(0, 1), StageSpec(1, 3)), "zero-bubble", 8, in_flight=3, weight_lag=4)
    assert ", 3 in flight, weight gradients 4 microbatches late" in told(made, CHAIN, FREE)


def test_ranks_that_hold_several_stages_are_explained():
    """Two ranks, one layer a stage: each computes 6 s a microbatch, in both of its stages together."""
    profile = ModelProfile(tuple(layer(str(i)) for i in range(4)), 1)
    plan = Plan(tuple(StageSpec(i, i + 1) for i in range(4)), "interleaved-1f1b", 4, chunks=2)
    text = told(plan, profile, FREE)
    assert "plan 1-1x2: 4 stages on 2 of 4 ranks, interleaved-1f1b" in text
    assert "bottleneck: computing in the stages of group 0, 24 s of 27 s" in text


def test_a_model_that_takes_no_time_is_explained():
    profile = ModelProfile((layer(forward=0.0, backward=0.0),), 1)
    assert "0 us a minibatch of 4 samples" in told(Plan.data_parallel(1, 2, 4), profile, FREE)


# The command


@pytest.fixture
def files(tmp_path):
    profile = ModelProfile(
        tuple(LayerProfile(f"l{i}", 0.01, 0.02, 1000, 10, 100) for i in range(4)),
        samples=8,
        others=(Measurement(4, tuple(LayerProfile(f"l{i}", 0.004, 0.008, 1000, 5, 50) for i in range(4))),),
    )
    write_json(tmp_path / "p.json", profile)
    write_json(tmp_path / "c.json", Cluster((Level("network", 4, 1e9, 1e-5),)))

    def plan(*options):
        return main(
            ["plan", "--profile", str(tmp_path / "p.json"), "--cluster", str(tmp_path / "c.json"), *options]
        )

    return tmp_path, plan


def test_plan_writes_what_it_says(files, capsys):
    folder, plan = files
    assert plan("--json", "--out", str(folder / "plan.json")) == 0
    document = json.loads(capsys.readouterr().out)
    written = read_plan(folder / "plan.json")
    assert document["num_microbatches"] == written.num_microbatches == 4 * 4 * 8 // 4  # 4 samples are faster
    assert plan("--microbatch", "8", "--json") == 0
    assert json.loads(capsys.readouterr().out)["num_microbatches"] == 16


def test_plan_takes_its_options(files, capsys):
    _, plan = files
    assert plan("--ranks", "2", "--minibatch", "32", "--recompute", "--memory", "100000") == 0
    text = capsys.readouterr().out
    assert "of 2 ranks, 1f1b, 8 microbatches of 4 samples" in text and "of 100 kB" in text
    assert plan("--schedule", "pipedream") == 0
    assert "whole minibatches of 8 samples" in capsys.readouterr().out
    assert plan("--schedule", "pipedream", "--vertical-sync", "--max-in-flight", "2", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["vertical_sync"] and document["max_in_flight"] == 2
    assert plan("--schedule", "pipedream-2bw", "--prediction", "spectrain", "--json") == 0
    assert json.loads(capsys.readouterr().out)["prediction"] == "spectrain"


def test_plan_chooses_the_schedule(files, capsys):
    _, plan = files
    assert plan("--schedule", "auto") == 0
    text = capsys.readouterr().out
    assert "interleaved-1f1b" in text and "zero-bubble" in text and "pipedream" not in text
    assert plan("--schedule", "auto", "--asynchronous") == 0
    assert "pipedream-2bw" in capsys.readouterr().out
    assert plan("--schedule", "interleaved-1f1b", "--json") == 0
    assert json.loads(capsys.readouterr().out)["chunks"] >= 2


def test_simulate_plans_anew_for_other_ranks(files, capsys):
    folder, plan = files
    assert plan("--schedule", "interleaved-1f1b", "--ranks", "2", "--out", str(folder / "plan.json")) == 0
    capsys.readouterr()
    arguments = ("--plan", "plan.json", "--profile", "p.json", "--cluster", "c.json")
    paths = [str(folder / name) if name.endswith(".json") else name for name in arguments]
    assert main(["simulate", *paths, "--ranks", "4"]) == 0
    assert "after" in capsys.readouterr().out


@pytest.mark.parametrize(
    "options, message",
    [
        (["--ranks", "5"], "ranks must be at most the cluster's 4, got 5"),
        (["--minibatch", "4", "--microbatch", "5"], "--microbatch must be <= --minibatch = 4, got 5"),
        (
            ["--schedule", "pipedream", "--minibatch", "4", "--microbatch", "2"],
            "--microbatch must be the minibatch of 4 samples under pipedream, where it travels whole, got 2",
        ),
        (["--asynchronous"], "asynchronous must be false under 1f1b, got true: it goes with auto"),
        (["--vertical-sync"], "vertical_sync must be false under 1f1b, got true"),
        (["--prediction", "xpipe"], "prediction must be off under 1f1b, whose gradients are never late"),
        (["--schedule", "auto", "--vertical-sync"], "vertical_sync must be false unless asynchronous "),
        (["--schedule", "gpipe", "--max-in-flight", "2"], "max_in_flight must not be given under gpipe"),
        (
            ["--schedule", "interleaved-1f1b", "--ranks", "1"],
            "schedule interleaved-1f1b needs at least 2 ranks and 4 layers, got 1 and 4",
        ),
        (["--memory", "1000"], "no plan fits into memory: "),
    ],
)
def test_mistakes_are_told_in_one_line(files, capsys, options, message):
    _, plan = files
    assert plan(*options) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"hybridpipe: plan: {message}") and error.count("\n") == 1


def test_what_stages_share_is_told_where_a_plan_separates_it():
    shared = SharedParameter("embed.weight", (0, 2), 40)
    profile = ModelProfile(
        (layer("a", parameters=40), layer("b"), layer("c", parameters=40)), samples=2, shared=(shared,)
    )
    cut = Plan((StageSpec(0, 1), StageSpec(1, 3)), num_microbatches=2)
    line = "shared: embed.weight (40 B), held by stages 0-1, its gradients exchanged in each update"
    assert line in told(cut, profile, FREE).splitlines()
    assert "shared" not in told(Plan((StageSpec(0, 3),)), profile, FREE)


def test_a_model_of_one_layer_says_why():
    profile = ModelProfile((layer("Net"),), samples=2, why_whole="m.py:8: item reads data")
    assert "one stage: m.py:8: item reads data" in told(Plan((StageSpec(0, 1),)), profile, FREE).splitlines()


def test_runs_of_the_same_plan_are_told_in_the_comparison():
    runs = {name: {"plan": "1-1", "metrics": {}} for name in ("auto", "dp", "straight")}
    assert compare_table(runs, "dp").splitlines()[-1] == "(p2p and all-reduced: of all ranks, per minibatch)"
    runs["straight"] |= {"same_plan_as": "auto"}
    *rows, legend = compare_table(runs, "dp").splitlines()
    assert [row.split()[:2] for row in rows[2:]] == [["auto", "1-1"], ["dp", "1-1"], ["straight", "1-1,"]]
    assert legend.endswith("; straight ran the plan of auto: they differ by the machine's drift only)")
