from pytest import approx

from hybridpipe.run_folder.data import Comparison, MetricsLine, RunData, Summary
from hybridpipe.run_folder.page.compare_page import compare_page
from hybridpipe.run_folder.page.html import render
from tests.report.made import EVIL
from tests.report.pages import Tree


def figures(plan: str, speed: float, predicted: float | None = None) -> Summary:
    more = {"minibatches": 4, "bytes_sent_p2p": 8000, "bytes_allreduced": 0, "loss_last": 0.5}
    return Summary(plan, samples_per_second=speed, predicted_samples_per_second=predicted, **more)


def run(seconds: float) -> RunData:
    return RunData("round0", records=tuple(MetricsLine(i, 0, 1.0 / (1 + i), 8, seconds) for i in range(4)))


TWO = Comparison(
    "compare",
    2,
    3,
    {"auto": figures("1-1", 300.0, 400.0), "dp": figures("2", 200.0)},
    {"auto": run(0.1), "dp": run(0.2)},
    {"auto": "auto/round0/report.html"},
)


def test_the_fastest_is_told_beside_the_reference():
    page = compare_page(TWO)
    assert [(each.name, each.value) for each in page.figures] == [
        ("fastest", "auto"),
        ("its samples/s", "300"),
        ("beside dp", "1.50×"),
    ]
    assert page.facts == ("2 ranks, 3 rounds", "in compare")


def test_speeds_have_one_scale_and_marks_of_their_predictions():
    bars = compare_page(TWO).sections[0].blocks[0]
    fast, slow = bars.rows
    assert fast.segments[0].width / slow.segments[0].width == 1.5
    assert fast.mark / fast.segments[0].width == approx(400 / 300) and slow.mark is None


def test_losses_have_one_axis_of_minibatches_and_one_of_seconds():
    minibatches, seconds = compare_page(TWO).sections[1].blocks[0].charts
    assert minibatches.paths[0].data == minibatches.paths[1].data
    assert seconds.paths[0].data != seconds.paths[1].data
    assert minibatches.legend == (("accent", "auto"), ("second", "dp"))


def test_runs_without_figures_are_a_page():
    bare = Comparison(EVIL, 2, 1, {EVIL: Summary(EVIL)}, {EVIL: RunData(EVIL)}, {})
    seen = Tree(render(compare_page(bare)))
    assert "Speed" in seen.texts and "Learning" not in seen.texts and EVIL in seen.texts
    assert "script" not in {tag for tag, _ in seen.tags}
