from pytest import approx

from hybridpipe.planning.plan import Plan, Prediction
from hybridpipe.report.learning import charts, epoch_rows
from hybridpipe.report.run import Epoch, Record, Run, Summary

RECORDS = tuple(Record(i, i // 5, 2.0 - i / 10, 8, 0.1) for i in range(10))
EPOCHS = tuple(Epoch(e, 0.5, 1.5 - e, {"loss": 1.0, "accuracy": 0.5 + e / 4}) for e in range(2))
RUN = Run("run", summary=Summary(epochs=EPOCHS, predicted_minibatch_seconds=0.08), records=RECORDS)


def drawn(run: Run):
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
    found = drawn(Run("run", plan=plan, records=RECORDS))
    assert [*found] == ["Loss", "Time of a minibatch, ms"]
    assert len(found["Time of a minibatch, ms"].paths) == 2


def test_without_records_epochs_are_counted():
    found = drawn(Run("run", summary=RUN.summary))
    assert [*found] == ["Loss", "Accuracy of the validation"]
    assert {chart.below for chart in found.values()} == {"epochs"}


def test_records_of_fewer_epochs_than_the_history():
    """A file that was lost, after which the training was resumed: its epochs have no place on the axis."""
    found = drawn(Run("run", summary=RUN.summary, records=RECORDS[5:]))
    assert [dot.left for dot in found["Loss"].dots] == [100]


def test_every_epoch_has_a_row():
    assert epoch_rows(RUN)[1] == {
        "epoch": "2",
        "loss": "0.5",
        "seconds": "0.50",
        "validation loss": "1",
        "validation accuracy": "0.75",
    }
    assert epoch_rows(Run("run", summary=Summary(epochs=(Epoch(0, 1.0),))))[0]["validation loss"] == "-"
