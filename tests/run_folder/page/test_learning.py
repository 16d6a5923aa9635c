from pytest import approx

from hybridpipe.planning.plan import Plan, Prediction
from hybridpipe.run_folder.data import Epoch, MetricsLine, RunData, Summary
from hybridpipe.run_folder.page.learning import best_epoch, charts, epoch_rows

RECORDS = tuple(MetricsLine(i, i // 5, 2.0 - i / 10, 8, 0.1) for i in range(10))
EPOCHS = tuple(Epoch(e, 0.5, 1.5 - e, {"loss": 1.0, "accuracy": 0.5 + e / 4}) for e in range(2))
RUN = RunData("run", summary=Summary(epochs=EPOCHS, predicted_minibatch_seconds=0.08), records=RECORDS)


def drawn(run: RunData):
    return {chart.title: chart for chart in charts(run)}


def test_a_validation_stands_where_its_epoch_ends():
    found = drawn(RUN)
    assert [*found] == ["Loss", "Accuracy of the validation", "Time of a minibatch, ms"]
    assert [dot.left for dot in found["Loss"].dots] == [50, 100]
    assert [dot.text for dot in found["Accuracy of the validation"].dots] == [
        "validation 0.5",
        "validation 0.75",
    ]


def test_the_time_is_in_milliseconds_beside_the_prediction():
    time = drawn(RUN)["Time of a minibatch, ms"]
    assert [path.form for path in time.paths] == ["median", "rule"]
    heights = [float(path.data.split()[1].split("L")[0]) for path in time.paths]
    assert (100 - heights[1]) / (100 - heights[0]) == approx(0.8, abs=1e-3)


def test_a_training_that_has_not_ended_shows_what_its_plan_predicts():
    plan = Plan.data_parallel(1, 1, 1, "1f1b")
    plan = Plan(plan.stages, predicted=Prediction(0.08, 100.0, 0.0, (1,)))
    found = drawn(RunData("run", plan=plan, records=RECORDS))
    assert [*found] == ["Loss", "Time of a minibatch, ms"]
    assert len(found["Time of a minibatch, ms"].paths) == 2


def test_without_records_epochs_are_counted():
    found = drawn(RunData("run", summary=RUN.summary))
    assert [*found] == ["Loss", "Accuracy of the validation"]
    assert {chart.below for chart in found.values()} == {"epochs"}


def test_records_of_fewer_epochs_than_the_history():
    """A file that was lost, after which the training was resumed: its epochs have no place on the axis."""
    found = drawn(RunData("run", summary=RUN.summary, records=RECORDS[5:]))
    assert [dot.left for dot in found["Loss"].dots] == [100]


def test_every_epoch_has_a_row():
    assert epoch_rows(RUN)[1] == {
        "epoch": "2",
        "loss": "0.5",
        "seconds": "0.50",
        "validation loss": "1",
        "validation accuracy": "0.75",
    }
    assert epoch_rows(RunData("run", summary=Summary(epochs=(Epoch(0, 1.0),))))[0]["validation loss"] == "-"


def test_learning_rate_and_gradient_norm_have_curves():
    made = tuple(each._replace(learning_rate=0.1, gradient_norm=each.loss) for each in RECORDS)
    found = drawn(RunData("run", records=made))
    assert found.keys() >= {"Learning rate", "Norm of the gradient, before clipping"}
    assert found["Learning rate"].hovers[0].text == "1: learning rate 0.1"
    assert [tick.text for tick in found["Loss"].epochs] == ["epoch 1"]  # the second is under way
    # by max_steps, within the second
    ended = RunData("run", summary=Summary(epochs=EPOCHS[:1]), records=made)
    assert [tick.text for tick in drawn(ended)["Loss"].epochs] == ["epoch 1"]
    assert [tick.text for tick in drawn(RUN)["Loss"].epochs] == ["epoch 1", "epoch 2"]


def test_a_far_longer_minibatch_is_cut_off_and_named():
    """A new shape was recorded in it; the other minibatches were a line on the ground of the chart."""
    long = (*RECORDS[:6], RECORDS[6]._replace(seconds=12.7), *RECORDS[7:])
    time = drawn(RunData("run", records=long))["Time of a minibatch, ms"]
    assert time.below == "minibatches; 1 cut off above, the longest: 7 took 12.7 s"
    assert time.upward[-1].text == "300"
    assert drawn(RUN)["Time of a minibatch, ms"].below == "minibatches"


def test_the_best_epoch_is_that_of_the_best_validation():
    epochs = tuple(
        Epoch(e, 0.5, 1.0, {"loss": loss, "accuracy": e}) for e, loss in enumerate((2.0, 0.5, 0.7))
    )
    assert best_epoch(epochs) == (1, "best epoch: 2 of 3, validation loss 0.5")
    accuracies = tuple(Epoch(e, 0.5, 1.0, {"accuracy": e / 4}) for e in range(3))
    assert best_epoch(accuracies) == (2, "best epoch: 3 of 3, validation accuracy 0.5")
    assert best_epoch((Epoch(0, 1.0, 2.0),)) is None and best_epoch(()) is None
