"""`hybridpipe replay` as a user types it: what it moves is what profile and plan say."""

import json
import subprocess
import sys

import pytest

from hybridpipe.files import write_json
from hybridpipe.planning.cluster import Cluster
from hybridpipe.planning.plan import Plan, StageSpec
from hybridpipe.planning.profile import LayerProfile, ModelProfile

HEADER = 64  # bytes of a message
SCALE = 4
GRAPH = """node1 -- Input0 -- forward_compute_time=0.0, backward_compute_time=0.0, activation_size=0.0, parameter_size=0.0
node2 -- Linear -- forward_compute_time=1.0, backward_compute_time=2.0, activation_size=1024.0, parameter_size=4096.0
node3 -- Linear -- forward_compute_time=1.0, backward_compute_time=2.0, activation_size=512.0, parameter_size=2048.0
\tnode1 -- node2
\tnode2 -- node3
"""  # noqa: E501


@pytest.fixture
def folder(tmp_path):
    """Three layers; what a cut after the second carries has a gradient by half."""
    layers = (
        LayerProfile("a", 1e-3, 2e-3, 4096, 2048, 0),
        LayerProfile("b", 1e-3, 2e-3, 8192, 1024, 0, gradient_bytes=512),
        LayerProfile("c", 1e-3, 2e-3, 2048, 512, 0, update_seconds=1e-3),
    )
    write_json(tmp_path / "profile.json", ModelProfile(layers, samples=2))
    write_json(tmp_path / "cluster.json", Cluster.flat(3, 1e9, 1e-5))
    (tmp_path / "graph.txt").write_text(GRAPH)
    return tmp_path


def words(folder, profile, plan, *more) -> list[str]:
    write_json(folder / "plan.json", plan)
    files = ["--profile", str(folder / profile), "--plan", str(folder / "plan.json")]
    return ["replay", *files, "--scale", str(SCALE), "--out", str(folder / "out"), *more]


def summary(folder) -> dict:
    return json.loads((folder / "out/summary.json").read_text())


def test_synchronous(job, folder):
    plan = Plan((StageSpec(0, 2, 2), StageSpec(2, 3, 1)), num_microbatches=4)
    cluster = ["--cluster", str(folder / "cluster.json"), "--minibatches", "5", "--no-overlap"]
    done = job(3, "hybridpipe", *words(folder, "profile.json", plan, *cluster))
    assert "2-1, 1f1b: " in done.stdout and done.stdout.count("\n") == 1
    told = summary(folder)
    assert (told["plan"], told["minibatches"], told["overlap"]) == ("2-1", 5, False)
    forward, back = HEADER + 128 + 128, HEADER + 64 + 128  # half of the 256 bytes has a gradient
    assert told["bytes_sent_p2p"] == 5 * 4 * (forward + back)
    assert told["bytes_allreduced"] == 5 * 2 * (4096 + 8192) // SCALE  # the last layer has one replica
    assert told["predicted_minibatch_seconds"] > 4 * 3e-3  # the last stage's four microbatches
    assert told["samples_per_second"] == pytest.approx(8 / told["minibatch_seconds_median"])


def test_replicas_that_shard_the_update(job, folder):
    """By a reduce-scatter, whose rows also count the gradients, and an all-gather of padded weights."""
    plan = Plan((StageSpec(0, 2, 2, zero=2, scatter=True), StageSpec(2, 3, 1)), num_microbatches=4)
    job(3, "hybridpipe", *words(folder, "profile.json", plan, "--minibatches", "3"))
    told, weights = summary(folder), (4096 + 8192) // SCALE
    counts = 2 * 2 * 4  # two replicas, two parameters, of four bytes
    assert told["bytes_allreduced"] == 3 * 2 * 2 * (weights + counts)  # minibatches, ranks, rounds
    assert told["bytes_gathered"] == 3 * 2 * weights


def test_asynchronous_from_a_published_graph(job, folder):
    plan = Plan((StageSpec(0, 1, 1), StageSpec(1, 2, 2)), "pipedream")  # inputs are no layer
    job(3, "hybridpipe", *words(folder, "graph.txt", plan, "--minibatches", "8"))
    told = summary(folder)
    assert told["bytes_sent_p2p"] == 8 * (
        2 * HEADER + 64 + 2 * 1024 // SCALE
    )  # gradients say which there are
    assert told["bytes_allreduced"] == 8 // 2 * 2 * 2048 // SCALE  # once in a round of two minibatches
    assert told["predicted_minibatch_seconds"] is None


def test_mistakes_are_told_in_one_line(folder):
    alone = [sys.executable, "-m", "hybridpipe"]
    three, late = Plan.data_parallel(3, 3, 3), Plan.data_parallel(3, 1, 1, "pipedream")
    for profile, plan, more, told in (
        ("none.json", three, [], "none.json: cannot be read"),
        ("profile.json", Plan.data_parallel(4, 3, 3), [], "the plan cuts 4 layers, the profile has 3"),
        ("profile.json", three, ["--scale", "0"], "--scale: must be a number >= 1, got '0'"),
        ("profile.json", late, ["--no-overlap"], "--no-overlap goes with a synchronous schedule"),
        ("profile.json", three, [], "plan needs 3 = 3 ranks, got 1"),
    ):
        command = [*alone, *words(folder, profile, plan, *more)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 2 and told in done.stderr and done.stderr.count("\n") == 1, done.stderr
