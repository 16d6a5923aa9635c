"""Run folder: the files that a training leaves for a report: its plan, its records, its results.

Known here are a trainer that is read, and the folder; not who trains, nor what is printed.
Invariant: rank 0 writes, and what was written of an earlier training is removed first.
"""

import json
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from hybridpipe.errors import UserError
from hybridpipe.files import write_json, write_text
from hybridpipe.health import failure
from hybridpipe.planning.simulator.predict import predict
from hybridpipe.planning.timeline import TRACE_FORMAT
from hybridpipe.report.folder import REPORT
from hybridpipe.report.notices import notices
from hybridpipe.report.rank_time import compared
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


class Records:
    """The lines of metrics.jsonl, which rank 0 writes."""

    def __init__(self, trainer: TrainerView, out: Path, appends: bool) -> None:
        self._file: TextIO | None = None
        if trainer.world.rank == 0:
            self._file = _opened(out / "metrics.jsonl", trainer.step if appends else 0)

    def note(self, record: MinibatchRecord) -> None:
        """Write the record of a finished minibatch."""
        if self._file is not None:
            print(json.dumps(asdict(record)), file=self._file, flush=True)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def begin(out: Path) -> None:
    """Make the folder, and remove an earlier training's results, which would be taken for this one's."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        failure.refuse(UserError(f"{out}: cannot be made: {error.strerror}"))
    for path in map(out.joinpath, RESULTS):
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            failure.refuse(UserError(f"{path}: cannot be removed: {error.strerror}"))


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


def _opened(path: Path, step: int) -> TextIO:
    """Open the file of records to append from `step` on; 0 starts it anew.

    Records from `step` on, written by a run that was lost, are dropped.
    """
    kept = []
    if step and path.exists():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                record = json.loads(line)
            except ValueError:  # a line cut short when the run was killed
                break
            if not isinstance(record, dict) or record.get("step", step) >= step:
                break
            kept.append(line)
    write_text(path, "".join(f"{line}\n" for line in kept))
    return path.open("a", encoding="utf-8")
