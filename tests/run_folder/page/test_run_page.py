from dataclasses import replace

import pytest

from hybridpipe.run_folder.data import RunData
from hybridpipe.run_folder.page.html import render
from hybridpipe.run_folder.page.run_page import run_page
from hybridpipe.run_folder.report import read_run
from tests.report.made import EVIL, make_run
from tests.report.pages import Tree


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> RunData:
    return read_run(make_run(tmp_path_factory.mktemp("run")))


def shown(run: RunData) -> Tree:
    return Tree(render(run_page(run)))


def test_a_report_tells_the_whole_run(run):
    seen = shown(run)
    for told in (
        "Plan, and why",
        "4 stages on 4 of 4 ranks, 1f1b",
        "bottleneck",
        f"resuming from {EVIL}",
        "considered, by predicted time; the chosen plan stands out",
        "Loss (logarithmic)",
        "Accuracy of the validation",
        "Time of a minibatch, ms",
        "predicted",
        "measured",
        "Where each rank’s time went",
        "9.5 MB of 10 MB",
        "node1",
        "10 MB/s",
        f"{EVIL}.toml, plan auto",
        "epochs = 10",
    ):
        assert told.lower() in seen.text.lower(), told
    assert "Not in this report" not in seen.text
    assert "script" not in {tag for tag, _ in seen.tags}


def test_every_warning_is_shown(run):
    seen = shown(run)
    lines = seen.texts[seen.texts.index("5 warnings") + 1 :][:5]
    assert lines[:2] == [
        f"rank 0: {EVIL}; the update is skipped",
        "2 updates left out, for numbers that were not finite",
    ]
    full = "rank 0 had 9.5 MB of the 10 MB that it may have, and ranks 1-3 were nearly as full"
    assert "times as long as predicted" in lines[2] and lines[3] == full
    assert lines[4].startswith("predictions of messages over the level host are doubtful: at one size they ")
    assert "take 6.2 times as long as measured" in lines[4] and "measure again" in lines[4]


def test_a_run_of_1000_minibatches_is_small(tmp_path):
    """Eight ranks, and the events of 32 microbatches on each, twice."""
    page = render(run_page(read_run(make_run(tmp_path, 8, num_microbatches=32))))
    assert 50_000 < len(page.encode()) < 2_000_000


def test_ranks_limits_of_the_summary_count(run):
    limited = replace(run, summary=replace(run.summary, memory_limit_bytes=(None, 20_000_000, None, None)))
    text = shown(limited).text
    assert "9.5 MB of 20 MB" in text and "that it may have" not in text


@pytest.mark.parametrize("name", ["start", "summary", "plan", "profile", "cluster"])
def test_whatever_is_missing_the_rest_is_shown(run, name):
    told = f"{name}.json: is not there"
    text = shown(replace(run, **{name: None}, left_out=(told,))).text
    assert told in text and "Not in this report" in text
    assert ("not finished" in text) == (name == "summary")


def test_an_empty_run_is_a_page(run):
    assert "Plan, and why" not in shown(RunData("runs")).text


def test_a_plan_that_was_given_is_shown_without_reasons(run):
    given = replace(run, plan=replace(run.plan, predicted=None), profile=None, cluster=None)
    text = shown(given).text
    assert "as given: nothing was measured to predict it" in text and "bottleneck" not in text


def test_a_loss_that_is_not_finite_is_a_warning(run):
    spoilt = replace(run, records=tuple(each._replace(loss=float("nan")) for each in run.records[:3]))
    assert "the loss of 3 minibatches was not finite" in shown(spoilt).text
