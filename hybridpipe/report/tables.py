"""Tables of plans and runs for people. Takes data, returns text."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple

from hybridpipe.planning.cluster import Cluster
from hybridpipe.planning.cost.memory import peak_memory_bytes, versions_per_stage
from hybridpipe.planning.plan import Plan, StageSpec
from hybridpipe.planning.profile import ModelProfile
from hybridpipe.planning.quantities import duration, size
from hybridpipe.planning.schedules.generators import in_flight_per_stage
from hybridpipe.planning.schedules.registry import DEFAULT
from hybridpipe.planning.search.groups import GroupsForecast
from hybridpipe.planning.search.placement import dealt
from hybridpipe.planning.search.search import Candidate, fits, seconds_of, short_name, with_prediction
from hybridpipe.planning.simulator.predict import is_simulated, predict
from hybridpipe.planning.timeline import Timeline
from hybridpipe.report.stage_figures import StageFigures, bottleneck, stage_figures
from hybridpipe.report.table import table
from hybridpipe.report.words import counted, few, ranges

NUM_CANDIDATES = 6
LEGEND = (
    "compute, sends and receives: a microbatch's; link behind and exposed: a minibatch's; "
    "in flight: microbatches"
)
COMPARE_LEGEND = "p2p and all-reduced: of all ranks, per minibatch"

Row = dict[str, str]  # of a table: cells by heading


class PlanExplanation(NamedTuple):
    """A plan and the reasons for it, in parts.

    Args:
        headline: plan, ranks, schedule and microbatches.
        facts: lines about its speed, and about what the model decides.
        stages: a row for each stage.
        time: lines about what takes how long.
        considered: rows of the best candidates, best first; empty for a given plan.
        unused: why ranks stay unused; empty if none do.
    """

    headline: str
    facts: tuple[str, ...]
    stages: list[Row]
    time: tuple[str, ...]
    considered: list[Row]
    unused: str


def stage_rows(plan: Plan, profile: ModelProfile, cluster: Cluster) -> list[Row]:
    """Rows of a plan's stages: layers, ranks and predicted costs."""
    peaks = dict(zip(plan.ranks, peak_memory_bytes(profile, plan), strict=True))
    figures = stage_figures(plan, profile, cluster)
    stashes = in_flight_per_stage(plan, plan.num_microbatches)
    versions = versions_per_stage(plan)
    zeros = list(map(plan.zero_of, range(plan.num_stages)))
    rows = []
    for s, (stage, each) in enumerate(zip(plan.stages, figures, strict=True)):
        rows.append(
            {
                "stage": str(s),
                "layers": _layers(profile, stage),
                "ranks": ranges(stage.ranks),
                "compute": duration(each.work_seconds),
                "sends": _or_dash(size, each.sent_bytes),
                "receives": _or_dash(size, each.received_bytes),
                "link behind": _or_dash(duration, each.link_seconds),
                "all-reduce": _or_dash(duration, each.allreduce_seconds),
                "exposed": _or_dash(duration, each.exposed_seconds),
                "in flight": str(stashes[s]) + " recomputing" * plan.recomputes(s),
                **({"versions": str(versions[s])} if plan.is_asynchronous else {}),
                **({"zero": f"{zeros[s]}" + ", reduce-scatter" * plan.scatters(s)} if any(zeros) else {}),
                "memory": _memory(
                    max(map(peaks.__getitem__, stage.ranks)), min(map(cluster.memory, stage.ranks))
                ),
            }
        )
    return rows


def shown(candidates: Sequence[Candidate], chosen: Plan) -> list[Candidate]:
    """Return the candidates that are worth a row: the best, those proposed otherwise, and the chosen one."""
    others = (c for c in candidates[NUM_CANDIDATES:] if c.origin != "exact" or c.plan == chosen)
    return [*candidates[:NUM_CANDIDATES], *others]


def candidate_rows(candidates: Sequence[Candidate], chosen: Plan) -> list[Row]:
    """Rows of the best plans by predicted time, with the loss of each against the best."""
    best = candidates[0].seconds if candidates else 0.0
    return [
        {
            "": "->" if candidate.plan == chosen else "",
            "plan": short_name(candidate.plan),
            "schedule": candidate.plan.schedule,
            "ranks": str(candidate.plan.num_ranks),
            "cuts after layer": _cuts(candidate.plan),
            "microbatches": f"{candidate.plan.num_microbatches} x {candidate.samples}",
            "minibatch": duration(candidate.seconds),
            "loses": f"{candidate.seconds / best - 1:.0%}" if candidate.seconds > best > 0 else "",
            "bubble": f"{candidate.plan.predicted.bubble_fraction:.0%}" if candidate.plan.predicted else "-",
            "proposed by": ", ".join(_remarks(candidate)),
        }
        for candidate in shown(candidates, chosen)
    ]


def _remarks(candidate: Candidate) -> Iterator[str]:
    yield candidate.origin
    if any(map(candidate.plan.recomputes, range(candidate.plan.num_stages))):
        yield "recomputing"
    if zero := max(map(candidate.plan.zero_of, range(candidate.plan.num_stages))):
        yield f"zero = {zero}"
    if not is_simulated(candidate.plan):
        yield "not simulated"


def explanation(
    plan: Plan,
    candidates: Sequence[Candidate],
    profile: ModelProfile,
    cluster: Cluster,
    num_ranks: int | None = None,
) -> PlanExplanation:
    """Give the reasons for a plan.

    Args:
        plan: a plan with its prediction.
        candidates: the plans it was chosen from, best first; empty for a given plan.
        profile: the layers at the plan's microbatch size.
        num_ranks: usable ranks; by default all of the cluster.
    """
    total = cluster.num_ranks if num_ranks is None else num_ranks
    return PlanExplanation(
        headline(plan, profile.samples, total),
        (*_prediction(plan, profile, cluster), *_model(plan, profile)),
        stage_rows(plan, profile, cluster),
        tuple(_where_time_goes(plan, profile, cluster)),
        candidate_rows(candidates, plan),
        unused_ranks(plan, total, candidates),
    )


def headline(plan: Plan, samples: int, num_ranks: int) -> str:
    """Name a plan with its stages, ranks, schedule and microbatches.

    Args:
        samples: of a microbatch.
        num_ranks: usable ranks.
    """
    ranks = counted(num_ranks, "rank")
    used = ranks if num_ranks == 1 else f"{plan.num_ranks} of {ranks}"
    stages, of_samples = counted(plan.num_stages, "stage"), counted(samples, "sample")
    how = f"{plan.schedule}, {_slices(plan)} of {of_samples}{_particulars(plan)}"
    return f"plan {short_name(plan)}: {stages} on {used}, {how}"


def plan_lines(
    plan: Plan,
    candidates: Sequence[Candidate],
    profile: ModelProfile,
    cluster: Cluster,
    num_ranks: int | None = None,
) -> list[str]:
    """Say in at most four lines which plan runs, how fast it is by prediction, and which ranks stay unused.

    Args:
        plan, candidates, profile, cluster, num_ranks: as in `explanation`.
    """
    total = cluster.num_ranks if num_ranks is None else num_ranks
    speed, *ratios = _prediction(plan, profile, cluster)
    lines = [headline(plan, profile.samples, total), f"predicted: {speed}", "; ".join(ratios)]
    return [line for line in (*lines, unused_ranks(plan, total, candidates)) if line]


def forecast(plan: Plan, profile: ModelProfile, cluster: Cluster) -> list[str]:
    """Say in two lines which plan it is, and how fast by prediction, also beside data parallelism.

    Args:
        plan, profile, cluster: as in `explanation`.
    """
    assert plan.predicted is not None
    speed, *ratios = _prediction(plan, profile, cluster)
    if plan.num_ranks > plan.num_stages == 1:
        ratios.append("it is data parallelism")
    told = "; ".join([speed, f"bubble {plan.predicted.bubble_fraction:.0%}", *ratios])
    return [headline(plan, profile.samples, cluster.num_ranks), f"predicted: {told}"]


def plan_details(plan: Plan, candidates: Sequence[Candidate], profile: ModelProfile, cluster: Cluster) -> str:
    """Return what `plan_lines` leaves out as text: the model, the stages, the time, the other candidates.

    Args:
        plan, candidates, profile, cluster: as in `explanation`.
    """
    parts = [
        "\n".join(_model(plan, profile)),
        f"{table(stage_rows(plan, profile, cluster))}\n({LEGEND})",
        "\n".join(_where_time_goes(plan, profile, cluster)),
    ]
    if candidates:
        parts.append(f"considered, by predicted time{_sharing(cluster)}:")
        parts.append(table(candidate_rows(candidates, plan)))
    return "\n\n".join(filter(None, parts))


def explain(
    plan: Plan,
    candidates: Sequence[Candidate],
    profile: ModelProfile,
    cluster: Cluster,
    num_ranks: int | None = None,
) -> str:
    """Return `plan_lines` and `plan_details` as one text."""
    lines = plan_lines(plan, candidates, profile, cluster, num_ranks)
    return "\n".join([*lines, "", plan_details(plan, candidates, profile, cluster)])


def groups_line(groups: GroupsForecast, plan: Plan) -> str:
    """Say what groups would take, beside a plan on all ranks."""
    own = groups.plan.predicted
    assert own is not None
    exchange = f"{duration(groups.exchange_seconds)} / {groups.every} for {size(groups.exchanged_bytes)}"
    return (
        f"{groups.count} groups of plan {short_name(groups.plan)}, every {groups.every} minibatches: "
        f"{duration(groups.minibatch_seconds)} a minibatch ({duration(own.minibatch_seconds)} + {exchange}), "
        f"where plan {short_name(plan)} on all ranks takes {duration(seconds_of(plan))}; "
        "groups learn otherwise (docs/guide/groups.md)"
    )


def _prediction(plan: Plan, profile: ModelProfile, cluster: Cluster) -> Iterator[str]:
    assert plan.predicted is not None
    samples = plan.num_microbatches * profile.samples
    rate = plan.predicted.samples_per_second
    total = plan.predicted.minibatch_seconds
    yield f"{duration(total)} a minibatch of {samples} samples, {rate:,.0f} samples/s"
    alone = min(plan.ranks, key=lambda rank: (-cluster.speed(rank), rank))
    beside = {"one rank": (alone,), "data parallelism on the same ranks": plan.ranks}
    if plan.num_ranks < cluster.num_ranks <= max(plan.num_microbatches, plan.num_ranks):
        beside[f"data parallelism on all {cluster.num_ranks} ranks"] = tuple(range(cluster.num_ranks))
    for others, ranks in beside.items():
        other = _one_stage(plan, dealt(cluster, ranks))
        if total and other.stages != plan.stages:
            seconds = _seconds(with_prediction(other, profile, cluster))
            misfit = "" if fits(other, profile, cluster) else ", which does not fit into memory"
            yield f"{seconds / total:.2f} times as fast as {others}{misfit}"


def _model(plan: Plan, profile: ModelProfile) -> Iterator[str]:
    """Say why there is one stage, and what several stages share."""
    if profile.why_whole:
        yield f"one stage: {profile.why_whole}"
    for shared in profile.shared:
        stages = [
            s for s, stage in enumerate(plan.stages) if {*range(stage.start, stage.stop)} & {*shared.layers}
        ]
        if len(stages) > 1:
            what = f"{shared.name} ({size(shared.parameter_bytes)})"
            yield f"shared: {what}, held by stages {ranges(stages)}, its gradients exchanged in each update"


def _particulars(plan: Plan) -> str:
    parts = []
    if plan.traits.whole_minibatch:
        of_input = "each stage's newest" if plan.version_stage(1) else "those of the input stage"
        if plan.num_stages > 1:
            parts.append(f"stale weights: {of_input}")
        if plan.replicas[0] > 1:
            parts.append(f"one update every {plan.replicas[0]} minibatches")
    elif plan.is_asynchronous:
        parts.append("weights one update old")
    if plan.predicts_weights:
        parts.append(f"weights predicted ({plan.prediction})")
    if plan.max_in_flight is not None:
        parts.append(f"at most {plan.max_in_flight} in flight")
    if plan.in_flight is not None:
        parts.append(f"{plan.in_flight} in flight")
    if plan.weight_lag is not None:
        parts.append(f"weight gradients {plan.weight_lag} microbatches late")
    recomputing = [s for s in range(plan.num_stages) if plan.recomputes(s)]
    if len(recomputing) == plan.num_stages:
        parts.append("activations recomputed")
    elif recomputing:
        parts.append(f"activations recomputed in {_stages(recomputing)}")
    for zero in (1, 2):
        if sharded := [s for s in range(plan.num_stages) if plan.zero_of(s) == zero]:
            parts.append(f"zero = {zero} in {_stages(sharded)}")
    if splitting := [s for s in range(plan.num_stages) if plan.splits_experts(s)]:
        parts.append(f"experts split in {_stages(splitting)}")
    if plan.sync is not None:
        parts.append(f"gradients summed by {plan.sync}")
    return "".join(f", {each}" for each in parts)


def _stages(stages: Sequence[int]) -> str:
    return f"{'stage' if len(stages) == 1 else 'stages'} {ranges(stages)}"


def _slices(plan: Plan) -> str:
    if plan.traits.whole_minibatch:
        return "whole minibatches"
    return "1 microbatch" if plan.num_microbatches == 1 else f"{plan.num_microbatches} microbatches"


def _one_stage(plan: Plan, ranks: tuple[int, ...]) -> Plan:
    stages = (StageSpec(0, plan.num_layers, len(ranks), ranks),)
    # With one stage all synchronous schedules are equal.
    schedule = plan.schedule if plan.is_asynchronous else DEFAULT
    return Plan(stages, schedule, plan.num_microbatches)


def _where_time_goes(plan: Plan, profile: ModelProfile, cluster: Cluster) -> Iterator[str]:
    total, figures, shares = _seconds(plan), stage_figures(plan, profile, cluster), []
    # The timeline of an asynchronous pipeline contains its warm-up, which would distort the shares.
    if total and is_simulated(plan) and not plan.is_asynchronous:
        timeline = predict(plan, profile, cluster)[0]
        parts = asdict(timeline.parts(plan)).items()
        shares = [f"{name.removesuffix('_seconds')} {part / timeline.seconds:z.0%}" for name, part in parts]
        figures = _as_simulated(figures, plan, timeline)
    what, seconds = bottleneck(figures, total, plan.groups)
    yield f"bottleneck: {what}, {duration(seconds)} of {duration(total)}"
    if shares:
        yield f"the ranks' time by prediction, on average: {', '.join(shares)}"


def _as_simulated(
    figures: Sequence[StageFigures], plan: Plan, timeline: Timeline
) -> tuple[StageFigures, ...]:
    """Replace each stage's computing by that of the timeline.

    The formula lets all ranks of a machine compute at once. With more ranks than cores, its computing of a
    stage could exceed the whole minibatch.
    """
    spent = timeline.spent(plan)
    return tuple(
        replace(each, compute_seconds=max(spent[rank].compute_seconds for rank in stage.ranks) / plan.chunks)
        for each, stage in zip(figures, plan.stages, strict=True)
    )


def unused_ranks(plan: Plan, num_ranks: int, candidates: Sequence[Candidate] = ()) -> str:
    """Say which of `num_ranks` ranks the plan leaves unused, and why if it was searched for; "" for none."""
    unused = sorted(set(range(num_ranks)).difference(plan.ranks))
    if not unused:
        return ""
    stay = "stays" if len(unused) == 1 else "stay"
    who = f"{counted(len(unused), 'rank')} {stay} unused ({ranges(unused)})"
    if not candidates or plan != candidates[0].plan:  # it was given, or asked for by name: dp or straight
        return who
    larger = [candidate for candidate in candidates if candidate.plan.num_ranks > plan.num_ranks]
    if larger:
        best = larger[0].plan
        loss = _seconds(best) / (_seconds(plan) or 1) - 1
        return f"{who}: the best plan with more, {short_name(best)} on {best.num_ranks}, loses {loss:.1%}"
    return f"{who}: no plan with more that fits into memory is among the best"


def reference_of(runs: Iterable[str]) -> str:
    """Return the run that others are compared with: "dp" or else the first."""
    names = list(runs)
    return "dp" if "dp" in names else names[0]


def compare_table(runs: Mapping[str, Mapping[str, Any]], reference: str) -> str:
    """Return the `compare_rows` as text."""
    return f"{table(compare_rows(runs, reference))}\n({compare_legend(runs)})"


def compare_legend(runs: Mapping[str, Mapping[str, Any]]) -> str:
    """Say what is in the columns, and how to read rows of the same plan if there are any."""
    same = [
        f"{name} ran the plan of {twin}" for name, run in runs.items() if (twin := run.get("same_plan_as"))
    ]
    drift = f"{', '.join(same)}: they differ by the machine's drift only" if same else ""
    return "; ".join(filter(None, (COMPARE_LEGEND, drift)))


def compare_rows(runs: Mapping[str, Mapping[str, Any]], reference: str) -> list[Row]:
    """Rows of measured and predicted figures of several runs, and ratios to the run named `reference`."""
    base = runs.get(reference)
    rows = []
    for name, run in runs.items():
        speed, predicted = run.get("samples_per_second"), run.get("predicted_samples_per_second")
        twin = run.get("same_plan_as")
        row = {
            "run": name,
            "plan": f"{run['plan']}, as {twin}" if twin else run["plan"],
            "samples/s": _or_dash("{:,.0f}".format, speed),
            "predicted": _or_dash("{:,.0f}".format, predicted),
        }
        if base is not None:
            row[f"vs {reference}"] = _ratio(speed, base.get("samples_per_second"))
            row["predicted "] = _ratio(predicted, base.get("predicted_samples_per_second"))
        row |= {
            "accuracy": _accuracy(run),
            "last loss": "-" if run.get("loss_last") is None else f"{run['loss_last']:.5f}",
            "p2p": _a_minibatch(run, "bytes_sent_p2p"),
            "all-reduced": _a_minibatch(run, "bytes_allreduced"),
        }
        rows.append(row)
    return rows


def _or_dash(show: Callable[[float], str], value: float | None) -> str:
    return show(value) if value else "-"


def _memory(num_bytes: float, limit: float) -> str:
    return size(num_bytes) if math.isinf(limit) else f"{size(num_bytes)} of {size(limit)}"


def _layers(profile: ModelProfile, stage: StageSpec) -> str:
    first, last = profile.layers[stage.start].name, profile.layers[stage.stop - 1].name
    count = stage.stop - stage.start
    return first if count == 1 else f"{first} .. {last} ({count})"


def _cuts(plan: Plan) -> str:
    return few([str(stage.stop - 1) for stage in plan.stages[:-1]], ", ") or "-"


def _seconds(plan: Plan) -> float:
    assert plan.predicted is not None
    return plan.predicted.minibatch_seconds


def _sharing(cluster: Cluster) -> str:
    a_machine = cluster.node_ranks or 1
    speed = cluster.shared_speed(a_machine)
    if speed == cluster.shared_speed(1):
        return ""
    return (
        f" (ranks of a machine share its processors: {speed:.0%} of full speed while all {a_machine} compute)"
    )


def _a_minibatch(run: Mapping[str, Any], name: str) -> str:
    num_bytes, count = run.get(name), run.get("minibatches")
    return size(num_bytes / count) if num_bytes is not None and count else "-"


def _ratio(value: float | None, base: float | None) -> str:
    return f"{value / base:.2f}x" if value and base else "-"


def _accuracy(run: Mapping[str, Any]) -> str:
    accuracy = run["metrics"].get("accuracy")
    return "-" if accuracy is None else f"{accuracy:.2%}"
