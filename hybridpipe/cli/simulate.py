"""Simulate: the command that predicts a plan's timeline and memory, also on changed machines.

Knows files and planning; neither torch nor MPI. Invariant: plan and cluster in the files stay as they are.
"""

import argparse
import json
from dataclasses import asdict, replace

from hybridpipe.errors import UserError
from hybridpipe.files import read_cluster, read_plan, read_profile, write_json, write_text
from hybridpipe.planning import cluster_transform, draw
from hybridpipe.planning.cluster import Cluster
from hybridpipe.planning.cost.memory import curves
from hybridpipe.planning.plan import Plan
from hybridpipe.planning.profile import ModelProfile
from hybridpipe.planning.request import PlanRequest
from hybridpipe.planning.schedules.generators import ceil_div
from hybridpipe.planning.search.search import search_sizes
from hybridpipe.planning.simulator.predict import predict
from hybridpipe.planning.timeline import TRACE_FORMAT, Timeline
from hybridpipe.report.tables import forecast


def simulate(options: argparse.Namespace) -> int:
    """Predict the timeline of the plan that `options` name, print and write it; return exit code 0."""
    plan, profile = read_plan(options.plan), read_profile(options.profile)
    cluster = read_cluster(options.cluster)
    profile = profile.scaled_to(plan.microbatch_samples or profile.samples)
    before: Plan | None = None
    source = str(options.plan)
    try:
        timeline, prediction = predict(plan, profile, cluster)
        plan = replace(plan, predicted=prediction)
        if (options.bandwidth, options.latency, options.ranks) != (None, None, None):
            before, source = plan, "simulate"
            plan, cluster = _changed(plan, profile, cluster, options)
            timeline, prediction = predict(plan, profile, cluster)
            plan = replace(plan, predicted=prediction)
        lines = [] if options.json else forecast(plan, profile, cluster)
    except ValueError as error:
        raise UserError(f"{source}: {error}") from None
    _write(options, plan, profile, timeline)
    if options.json:
        _print_figures(plan, before)
        return 0
    if before is not None:
        lines = [cluster_transform.figures({"before": before, "after": plan}), "", *lines]
    shown = [f"timeline: {options.plot}"] if options.plot else ["", draw.text(timeline)]
    print("\n".join([*lines, *shown]))
    return 0


def _write(options: argparse.Namespace, plan: Plan, profile: ModelProfile, timeline: Timeline) -> None:
    """Write the files that `options` name."""
    if options.trace:
        events = timeline.to_chrome_trace("predicted")
        write_json(options.trace, {"format": TRACE_FORMAT, "traceEvents": events, "displayTimeUnit": "ms"})
    if options.plot:
        slices = "" if plan.traits.whole_minibatch else f", {plan.num_microbatches} microbatches"
        title = f"Plan {plan.name} under {plan.schedule}{slices}"
        memory = curves(profile, plan, timeline)
        write_text(options.plot, draw.svg(timeline, plan, title, memory, plan.predicted))


def _changed(
    plan: Plan, profile: ModelProfile, cluster: Cluster, options: argparse.Namespace
) -> tuple[Plan, Cluster]:
    """Return plan and cluster after the changes by --bandwidth, --latency and --ranks.

    A plan fits one number of ranks: another number gets a new plan, with as many microbatches a rank.
    """
    changed = cluster_transform.changed(cluster, options.bandwidth, options.latency, options.ranks)
    if options.ranks is None:
        return plan, changed
    count = ceil_div(plan.num_microbatches * options.ranks, cluster.num_ranks)
    count = 1 if plan.traits.whole_minibatch else count
    found = search_sizes(
        profile.of_one_size, changed, profile.samples * count, PlanRequest.of(plan), options.ranks
    )
    return found[0].plan, changed


def _print_figures(plan: Plan, before: Plan | None) -> None:
    """Print a plan's prediction as JSON, beside that of the plan before the change if there was one."""
    assert plan.predicted is not None
    if before is None:
        print(json.dumps(asdict(plan.predicted)))
    else:
        print(json.dumps({name: asdict(each) for name, each in (("before", before), ("after", plan))}))
