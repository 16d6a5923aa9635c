"""Write: the files that a training leaves in its folder: its plan, its records, its results.

Known here are a trainer that is read, and the folder; not who trains, nor what is printed.
Invariant: rank 0 writes, and what was written of an earlier training is removed first.
"""

import json
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from hybridpipe.errors import NotSaved
from hybridpipe.files import open_after, write_json, writing
from hybridpipe.notices import notices
from hybridpipe.planning.simulator.predict import predict
from hybridpipe.planning.timeline import TRACE_FORMAT
from hybridpipe.report.rank_time import compared
from hybridpipe.run_folder.report import REPORT
from hybridpipe.training.metrics import MinibatchRecord, Traced
from hybridpipe.training.view import TrainerView

RESULTS = ("summary.json", "trace.json", REPORT)  # written at the end
SUMMARY_FORMAT = "hybridpipe-summary/1"


class Results(NamedTuple):
    """Results of a training, on rank 0.

    Args:
        summary: as in summary.json.
        parts: seconds of a minibatch by part, predicted and measured; None without a prediction.
        traced: each rank's time in the last minibatches; None without a full one.
        events: of trace.json.
    """

    summary: dict[str, Any]
    parts: dict[str, Any] | None
    traced: Traced | None
    events: list[dict[str, Any]]

    def write(self, out: Path) -> None:
        """Write summary.json and trace.json."""
        write_json(out / "summary.json", {"format": SUMMARY_FORMAT, **self.summary})
        trace = {"format": TRACE_FORMAT, "traceEvents": self.events, "displayTimeUnit": "ms"}
        write_json(out / "trace.json", trace)


class MetricsFile:
    """The lines of metrics.jsonl, which rank 0 writes."""

    def __init__(self, trainer: TrainerView, out: Path, appends: bool) -> None:
        self._file: TextIO | None = None
        if trainer.world.rank == 0:
            before = partial(_is_before, trainer.step if appends else 0)
            self._file = open_after(out / "metrics.jsonl", before)

    def note(self, record: MinibatchRecord) -> None:
        """Write the record of a finished minibatch."""
        if self._file is None:
            return
        try:
            print(json.dumps(asdict(record)), file=self._file, flush=True)
        except OSError as error:
            what = f"{self._file.name}: cannot be written: {error.strerror}"
            raise NotSaved(what, record.step) from error

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def remove_results(out: Path) -> None:
    """Remove an earlier training's results from a claimed folder: they would be taken for this one's."""
    for path in map(out.joinpath, RESULTS):
        with writing(path):
            path.unlink(missing_ok=True)


def write_plan(trainer: TrainerView, out: Path) -> None:
    """Write the plan with the profile and cluster behind it. Rank 0 only."""
    write_json(out / "plan.json", trainer.plan)
    if trainer.choice is not None:
        write_json(out / "profile.json", trainer.choice.profile)
        write_json(out / "cluster.json", trainer.choice.machines or trainer.choice.cluster)


def gather_results(trainer: TrainerView, trace: bool = False) -> Results | None:
    """Return the results on rank 0; None elsewhere. Collective.

    Args:
        trace: of the last minibatches, in place of a typical one.
    """
    summary, timeline = trainer.summary(), trainer.timeline()
    traced, told = trainer.traced(), trainer.world.gather(notices.lines())
    if summary is None:
        return None
    shown = traced.timeline if trace and traced else timeline
    events, parts = [] if shown is None else shown.to_chrome_trace("measured", process=0), None
    if trainer.choice is not None:
        simulated, _ = predict(trainer.plan, trainer.choice.profile, trainer.choice.cluster)
        events += simulated.to_chrome_trace("predicted", process=1)
        if traced is not None and not trainer.plan.is_asynchronous:  # there was a full minibatch
            parts = compared(simulated.parts(trainer.plan), traced.per_minibatch())
    predicted = summary["predicted_minibatch_seconds"]
    rate = trainer.minibatch_size / predicted if predicted else None
    summary |= {
        "predicted_samples_per_second": rate,
        "parts": parts,
        "rank_seconds": traced.per_minibatch() if traced else {},
        "warnings": list(dict.fromkeys(chain(*(told or [])))),
        "epochs": trainer.history,
        "ended": datetime.now(UTC).isoformat(timespec="milliseconds"),
    }
    return Results(summary, parts, traced, events)


def _is_before(step: int, line: str) -> bool:
    """True for a record of a minibatch before `step`; a run that was lost may have written later ones."""
    try:
        record = json.loads(line)
    except ValueError:
        return False
    return isinstance(record, dict) and record.get("step", step) < step
