"""Run page: the report of one training.

Takes `RunData`, returns a `Page`; not known here: files and HTML. Invariant: what the run's files lack is
left out, and said once.
"""

from collections.abc import Iterator, Mapping

from hybridpipe.planning.draw import shown_ranks
from hybridpipe.planning.plan import Plan
from hybridpipe.planning.quantities import duration, size
from hybridpipe.report import cluster as machines
from hybridpipe.report.memory import memory_rows
from hybridpipe.report.rank_time import TRACED
from hybridpipe.report.settings import toml_text
from hybridpipe.report.tables import LEGEND, explanation
from hybridpipe.report.words import counted, ranges, spell
from hybridpipe.run_folder.data import FILES, RunData, Summary
from hybridpipe.run_folder.page import learning
from hybridpipe.run_folder.page.bar_charts import StackedBar, StackedBars, stack, timelines
from hybridpipe.run_folder.page.html import Block, Charts, Lines, Listing, Page, Section, Table
from hybridpipe.run_folder.page.key_figures import figures, memory_limit, warnings

Names = Mapping[str, tuple[str, str]]  # by field: style and name of a bar's segment
PARTS: Names = {  # of `parts` in summary.json
    "forward_seconds": ("forward", "forward"),
    "backward_seconds": ("backward", "backward"),
    "step_seconds": ("step", "step"),
    "traffic_seconds": ("message", "traffic"),
    "allreduce_seconds": ("all-reduce", "all-reduce"),
    "idle_seconds": ("idle", "idle"),
    "other_seconds": ("other", "other"),
}
RANK_PARTS: Names = {  # of `rank_seconds`, whose first field is the whole
    field: ("step" if name == "optimizer" else name, name) for field, name in [*TRACED.items()][1:]
}

MEMORY_NOTE = "before training: Python, libraries, the model, and what measuring left behind"


def run_page(run: RunData) -> Page:
    """Lay out the report of a training."""
    summary = run.summary or Summary()
    what = "Minibatches" if run.plan and run.plan.is_asynchronous else "One minibatch"
    return Page(
        title=run.start.title if run.start and run.start.title else run.name,
        of="training",
        facts=tuple(_facts(run)),
        figures=tuple(figures(summary)),
        warnings=tuple(warnings(run)) if run.summary else None,
        sections=(
            Section("Plan, and why", (*_plan(run), *_notes(run))),
            Section("Learning", tuple(_learning(run))),
            Section(f"{what}, predicted and measured", tuple(_minibatch(run, summary))),
            Section("Where each rank’s time went", tuple(_ranks(summary))),
            Section("Memory", tuple(_memory(run, summary))),
            Section("Machines", tuple(_machines(run))),
            Section("Configuration", tuple(_configuration(run))),
            Section("Files", tuple(_files(run))),
            Section("Not in this report", (Lines(run.left_out),) if run.left_out else ()),
        ),
    )


def _facts(run: RunData) -> Iterator[str]:
    plan, start = run.plan, run.start
    if plan is not None:
        yield f"plan {plan.name}, {plan.schedule}"
    if start is not None:
        used = f"{plan.num_ranks} of " if plan and plan.num_ranks < len(start.hosts) else ""
        ranks, hosts = counted(len(start.hosts), "rank"), counted(len(set(start.hosts)), "host")
        yield f"{used}{ranks} on {hosts}, {start.device}"
        yield start.begun
    if run.seconds is not None:
        yield f"{spell(run.seconds)} from start to end"
    if run.summary is not None and run.summary.epochs:
        yield f"{spell(sum(each.seconds for each in run.summary.epochs))} in its epochs"
    if run.summary is None:
        yield "not finished"
    yield f"in {run.name}"


def _plan(run: RunData) -> Iterator[Block]:
    """Yield the plan and the reasons for it or, where nothing was measured, its stages only."""
    plan = run.plan
    if plan is None:
        return
    if plan.predicted is None or run.profile is None or run.cluster is None:
        yield Lines((f"Plan {plan.name}, {plan.schedule}, as given: nothing was measured to predict it.",))
        yield Table(_stages(plan))
        return
    found = explanation(plan, run.start.candidates if run.start else (), run.profile, run.cluster)
    speed, *facts = found.facts
    lines = (found.headline, f"predicted {speed}", *facts, *found.time)
    yield Lines(tuple(map(_sentence, lines)))
    yield Table(found.stages, LEGEND)
    if found.considered:
        chosen = next((i for i, row in enumerate(found.considered) if row[""]), None)
        rows = [{name: cell for name, cell in row.items() if name} for row in found.considered]
        yield Table(rows, "considered, by predicted time; the chosen plan stands out", chosen)
    if found.unused:
        yield Lines((_sentence(found.unused),))


def _notes(run: RunData) -> Iterator[Block]:
    if run.start is not None and run.start.notes:
        yield Lines(run.start.notes)


def _sentence(line: str) -> str:
    return line[:1].upper() + line[1:]


def _stages(plan: Plan) -> list[dict[str, str]]:
    return [
        {"stage": str(s), "layers": f"{stage.start} .. {stage.stop - 1}", "ranks": ranges(stage.ranks)}
        for s, stage in enumerate(plan.stages)
    ]


def _learning(run: RunData) -> Iterator[Block]:
    if charts := learning.charts(run):
        yield Charts(tuple(charts))
    if rows := learning.epoch_rows(run):
        best = learning.best_epoch(run.summary.epochs if run.summary else ())
        note = f"{best.text}, stands out" if best else ""
        yield Table(rows, note, best.row if best else None, title="each epoch")


def _minibatch(run: RunData, summary: Summary) -> Iterator[Block]:
    if run.plan is not None:
        names = [name for name in ("predicted", "measured") if name in run.timelines]
        yield from timelines({name: run.timelines[name] for name in names}, run.plan)
    if summary.parts is None:
        return
    ways = {
        way: {name: each.get(way, 0.0) for name, each in summary.parts.items()}
        for way in ("predicted", "measured")
    }
    yield _stacked("Time by activity, mean shares over the ranks", ways, PARTS)
    yield Table(
        [
            {"part": name} | {way: duration(seconds.get(field, 0.0)) for way, seconds in ways.items()}
            for field, (_, name) in PARTS.items()
        ],
        "idle: waiting for what nobody sends yet; other: loading, losses, the loop around the minibatches",
    )


def _ranks(summary: Summary) -> Iterator[Block]:
    if not summary.rank_seconds:
        return
    of_rank = {int(rank): seconds for rank, seconds in summary.rank_seconds.items()}
    ranks = shown_ranks(sorted(of_rank))
    rows = {f"rank {rank}": of_rank[rank] for rank in ranks}
    yield _stacked("The median minibatch of each rank", rows, RANK_PARTS, _left_out(ranks, len(of_rank)))
    yield Table(
        [
            {"rank": str(rank)}
            | {name: duration(of_rank[rank].get(field, 0.0)) for field, name in TRACED.items()}
            for rank in ranks
        ],
        "medians of the last full minibatches by the rank’s own clock, so that a few long ones do not count; "
        "idle: waiting for what nobody sends yet",
    )


def _left_out(ranks: list[int], count: int) -> str:
    return f"{len(ranks)} of {count} ranks" if len(ranks) < count else ""


def _stacked(
    title: str, rows: Mapping[str, Mapping[str, float]], names: Names, note: str = ""
) -> StackedBars:
    """Lay out seconds by part, a row each, on one scale."""
    sums = {label: sum(seconds.get(field, 0.0) for field in names) for label, seconds in rows.items()}
    whole = max(sums.values()) or 1.0
    return StackedBars(
        title,
        tuple(names[field] for field in names if any(seconds.get(field) for seconds in rows.values())),
        tuple(
            stack(
                label,
                [
                    (style, seconds.get(field, 0.0), f"{name} {duration(seconds.get(field, 0.0))}")
                    for field, (style, name) in names.items()
                ],
                whole,
                duration(sums[label]),
            )
            for label, seconds in rows.items()
        ),
        note,
    )


def _memory(run: RunData, summary: Summary) -> Iterator[Block]:
    peaks = summary.peak_memory_bytes
    if not peaks:
        return
    before = summary.memory_before_bytes or (0,) * len(peaks)
    limits = [memory_limit(run, rank) for rank in range(len(peaks))]
    ranks = shown_ranks(range(len(peaks)))
    whole = 1.02 * max([*peaks, *(limit for limit in limits if limit is not None)])
    bars = []
    for rank in ranks:
        first, limit = min(before[rank], peaks[rank]), limits[rank]
        parts = [
            ("faint", float(first), f"before training {size(first)}"),
            ("accent", float(peaks[rank] - first), f"more {size(peaks[rank] - first)}"),
        ]
        bar: StackedBar = stack(f"rank {rank}", parts, whole, _of(peaks[rank], limit))
        bars.append(bar._replace(mark=None if limit is None else 100 * limit / whole))
    legend = (("faint", "before training"), ("accent", "more, at most"), ("limit", "limit"))
    shown = legend if any(limit is not None for limit in limits) else legend[:2]
    yield StackedBars("Memory of each rank’s process", shown, tuple(bars), _left_out(ranks, len(peaks)))
    if run.plan is not None and max(run.plan.ranks) < len(peaks):
        origins = summary.memory_limit_origin or ("cluster.json",) * len(peaks)
        rows = memory_rows(run.plan, peaks, before, limits, origins)
        yield Table([row for row in rows if int(row["rank"]) in ranks], MEMORY_NOTE)


def _of(peak: int, limit: int | None) -> str:
    return size(peak) if limit is None else f"{size(peak)} of {size(limit)}"


def _machines(run: RunData) -> Iterator[Block]:
    start, cluster = run.start, run.cluster
    cores = start.num_cores[0] if start and len(set(start.num_cores)) == 1 else None
    if start is not None and start.hosts:
        ranks: dict[tuple[str, int], list[int]] = {}
        for rank, (host, count) in enumerate(zip(start.hosts, start.num_cores)):
            ranks.setdefault((host, count), []).append(rank)
        yield Table(
            [{"host": host, "ranks": ranges(of), "cores": str(count)} for (host, count), of in ranks.items()]
        )
    if cluster is not None:
        yield Table(machines.level_rows(cluster), "links as measured, and all-reduces over them")
        yield Lines(tuple(map(_sentence, machines.facts(cluster, cores))))
    if start is not None and start.versions:
        yield Lines((", ".join(f"{name} {version}" for name, version in start.versions.items()),))


def _configuration(run: RunData) -> Iterator[Block]:
    if run.start is None:
        return
    start = run.start
    lines = [f"{start.config}, plan {start.plan_source}; what is not named has its default"]
    lines += [f"Command of a rank: {start.command}"] if start.command else []
    lines += [f"Git commit: {start.commit}"] if start.commit else []
    yield Lines(tuple(lines))
    yield Listing(toml_text(run.start.settings))


def _files(run: RunData) -> Iterator[Block]:
    if run.files:
        rows = [{"file": name, "holds": FILES[name]} for name in run.files]
        yield Table(rows, links={name: name for name in run.files})
