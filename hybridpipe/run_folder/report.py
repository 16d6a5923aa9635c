"""Report: OUT/report.html, written from the files that a training or a comparison leaves in OUT.

Knows files and reports; neither torch nor MPI. Invariant: a file that is missing or damaged is reported in
one line, and the others are shown.
"""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import TypeVar

from hybridpipe.errors import UserError, shown
from hybridpipe.files import parse, read_cluster, read_json, read_object, read_plan, read_profile, write_text
from hybridpipe.notices import notices
from hybridpipe.planning.timeline import Timeline, from_chrome_trace
from hybridpipe.run_folder.data import FILES, RUN_FORMAT, Comparison, MetricsLine, RunData, RunStart, Summary
from hybridpipe.run_folder.page.compare_page import compare_page
from hybridpipe.run_folder.page.html import render
from hybridpipe.run_folder.page.run_page import run_page

T = TypeVar("T")

REPORT = "report.html"
OF_A_RUN = ("summary.json", "run.json", "plan.json", "metrics.jsonl")
MADE = ("learning_rate", "gradient_norm")  # of an update; null without one
OF_A_COMPARISON = "compare.json"


def report_at_end(folder: Path) -> bool:
    """Write the report of what has just ended; say so and return False if that fails."""
    try:
        write_report(folder)
    except Exception as error:  # whatever it is, the results are there and stay: it ends nothing
        notices.tell(f"{folder / REPORT} is not written: {error}")
        return False
    return True


def write_report(folder: Path) -> tuple[str, ...]:
    """Write `folder`/report.html; return a line for each file that it lacks.

    Raises:
        UserError: the folder is none of a training or a comparison, or the report cannot be written.
    """
    if (folder / OF_A_COMPARISON).exists():
        write_text(folder / REPORT, render(compare_page(read_comparison(folder))))
        return ()
    if not any((folder / name).exists() for name in OF_A_RUN):
        names = f"{', '.join(OF_A_RUN)} and {OF_A_COMPARISON}"
        raise UserError(
            f"{folder}: must be the folder of a training or a comparison, and has none of {names}; "
            "a script leaves them with the callback RunFolder"
        )
    run = read_run(folder)
    write_text(folder / REPORT, render(run_page(run)))
    return run.left_out


def read_run(folder: Path) -> RunData:
    """Read what a training has left in its folder."""
    left_out: list[str] = []

    def read(name: str, reader: Callable[[Path], T]) -> T | None:
        try:
            if (folder / name).exists():
                return reader(folder / name)
            left_out.append(f"{name}: is not there")
        except UserError as error:
            left_out.append(str(error))
        return None

    start = read("run.json", lambda path: read_json(path, RunStart, RUN_FORMAT))
    plan = read("plan.json", read_plan)
    measured = start is None or start.measured
    profile = read("profile.json", read_profile) if measured else None
    cluster = read("cluster.json", read_cluster) if measured else None
    if plan and profile and plan.num_layers != profile.num_layers:
        left_out.append(
            f"profile.json: must have {plan.num_layers} layers, as the plan, got {profile.num_layers}"
        )
        profile = None
    if plan and cluster and max(plan.ranks) >= cluster.num_ranks:
        left_out.append(
            f"cluster.json: must have rank {max(plan.ranks)}, as the plan, got {cluster.num_ranks} ranks"
        )
        cluster = None
    return RunData(
        name=folder.resolve().name,
        start=start,
        summary=read("summary.json", _summary),
        plan=plan,
        profile=profile,
        cluster=cluster,
        records=read("metrics.jsonl", _records) or (),
        timelines=read("trace.json", _timelines) or {},
        left_out=tuple(left_out),
        files=tuple(name for name in FILES if (folder / name).exists()),
    )


def read_comparison(folder: Path) -> Comparison:
    """Read what a comparison has left in its folder.

    Raises:
        UserError: compare.json is damaged.
    """
    path = folder / OF_A_COMPARISON
    document = read_object(path)
    try:
        ranks, rounds = int(document["ranks"]), int(document["rounds"])
        figures = {name: _known(path, of_run) for name, of_run in document["runs"].items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path}: must be written by hybridpipe compare: {error!r}") from None
    folders = {name: round_folder(folder, name, 0) for name in figures}
    return Comparison(
        folder.resolve().name,
        ranks,
        rounds,
        figures,
        {name: read_run(of_run) for name, of_run in folders.items()},
        {
            name: str((of_run / REPORT).relative_to(folder))
            for name, of_run in folders.items()
            if (of_run / REPORT).exists()
        },
    )


def round_folder(out: Path, name: str, round_number: int) -> Path:
    """Return the folder of one run of a comparison, by the name of its plan or baseline."""
    return out / Path(name).stem / f"round{round_number}"


def _summary(path: Path) -> Summary:
    return _known(path, read_object(path))


def _known(path: Path, document: object) -> Summary:
    """Return the fields that a report shows; others are not looked at."""
    if not isinstance(document, dict):
        raise UserError(f"{path}: must hold JSON objects, got {shown(document)}")
    names = {field.name for field in fields(Summary)}
    present = {name: value for name, value in document.items() if name in names and value is not None}
    return parse(Summary, present, str(path))


def _records(path: Path) -> tuple[MetricsLine, ...]:
    """Read the records up to a line that was cut short when the training was killed."""
    return tuple(_whole_records(path))


def _whole_records(path: Path) -> Iterator[MetricsLine]:
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                each = json.loads(line)
                loss = math.nan if each["loss"] is None else float(each["loss"])
                step, epoch = int(each["step"]), int(each["epoch"])
                made = (None if each.get(name) is None else float(each[name]) for name in MADE)
                yield MetricsLine(step, epoch, loss, int(each["num_samples"]), float(each["seconds"]), *made)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except (AttributeError, KeyError, TypeError, ValueError):
        return


def _timelines(path: Path) -> dict[str, Timeline]:
    try:
        return from_chrome_trace(read_object(path)["traceEvents"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path}: must be a trace of hybridpipe: {error!r}") from None
