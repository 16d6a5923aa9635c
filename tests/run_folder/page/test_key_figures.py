from dataclasses import replace

import pytest

from hybridpipe.planning.cluster import Cluster, Level
from hybridpipe.run_folder.data import MetricsLine, RunData, Summary
from hybridpipe.run_folder.page.key_figures import figures, memory_limit, warnings

CLUSTER = Cluster((Level("host", 2, 1e9, 1e-4, fit_error=0.1),), memory_bytes=1000)


def told(**fields) -> dict[str, tuple[str, str]]:
    return {each.name: (each.value, each.note) for each in figures(Summary(**fields))}


def test_figures_stand_beside_what_was_predicted():
    found = told(
        samples_per_second=1500.4,
        predicted_samples_per_second=2000.0,
        minibatch_seconds_median=0.05,
        predicted_minibatch_seconds=0.04,
        bubble_fraction=0.5,  # counts messages, too: it is no idle time
        rank_seconds={"0": {"seconds": 0.05, "idle_seconds": 0.02}, "1": {"seconds": 0.05}},
    )
    assert found["samples/s"] == ("1,500", "predicted 2,000 (-25%)")
    assert found["minibatch, median"] == ("50 ms", "predicted 40 ms (+25%)")
    assert found["idle"] == ("20%", "of the used ranks’ time in a minibatch")
    assert told(samples_per_second=10.0)["samples/s"] == ("10", "")


@pytest.mark.parametrize(
    "metrics, name, value, note",
    [
        ({"loss": 0.5, "accuracy": 0.912}, "validation accuracy", "91.2%", "loss 0.5"),
        ({"loss": 0.5, "bleu": 30.0}, "validation loss", "0.5", "bleu 30"),
        ({"loss": None, "bleu": 30.0}, "validation bleu", "30", ""),
    ],
)
def test_the_validation_is_its_accuracy_or_its_loss(metrics, name, value, note):
    assert told(metrics=metrics) == {name: (value, note)}


def test_a_target_that_was_reached_is_told():
    found = told(metrics={"loss": 0.5}, epochs_to_target=1)
    assert found["validation loss"] == ("0.5", "target reached after 1 epoch")


def test_nothing_known_is_no_figure():
    assert told() == {} and list(warnings(RunData("run"))) == []


@pytest.mark.parametrize("seconds, factor", [(0.5, "0.50"), (2.0, "2.00"), (1.2, None), (0.85, None)])
def test_a_prediction_that_is_far_off_is_a_warning(seconds, factor):
    summary = Summary(minibatch_seconds_median=seconds, predicted_minibatch_seconds=1.0)
    expected = [] if factor is None else [f"a minibatch took {factor} times as long as predicted"]
    assert list(warnings(RunData("run", summary=summary))) == expected


def test_rough_links_are_a_warning():
    level = replace(CLUSTER.levels[0], fit_error=1.6)
    (line,) = warnings(RunData("run", cluster=replace(CLUSTER, levels=(level,))))
    assert "over the level host are doubtful: at one size they take 2.6 times as long" in line
    assert list(warnings(RunData("run", cluster=CLUSTER))) == []


def test_a_full_rank_is_a_warning():
    run = RunData("run", summary=Summary(peak_memory_bytes=(950, 100)), cluster=CLUSTER)
    assert list(warnings(run)) == ["rank 0 had 950 B of the 1 kB that it may have"]


def test_the_limit_of_the_summary_goes_before_that_of_the_cluster():
    run = RunData("run", summary=Summary(memory_limit_bytes=(500, None)), cluster=CLUSTER)
    assert [memory_limit(run, rank) for rank in range(3)] == [500, None, None]
    assert memory_limit(replace(run, summary=None), 1) == 1000
    assert memory_limit(replace(run, summary=None, cluster=replace(CLUSTER, memory_bytes=None)), 1) is None


def test_losses_that_are_not_finite_are_counted():
    records = tuple(MetricsLine(i, 0, float("nan"), 1, 1.0) for i in range(1200))
    assert list(warnings(RunData("run", records=records))) == ["the loss of 1,200 minibatches was not finite"]
