"""Report: plans and runs as tables for people. Takes data, returns text."""

from collections.abc import Mapping, Sequence
from typing import Any

from tabulate import tabulate

from hybridpipe.planning.cluster import Cluster
from hybridpipe.planning.cost import compute_share, stage_costs
from hybridpipe.planning.plan import Plan
from hybridpipe.planning.profile import ModelProfile
from hybridpipe.planning.search import Candidate

NUM_CANDIDATES = 6


def plan_table(plan: Plan, profile: ModelProfile, cluster: Cluster) -> str:
    """The stages of a plan: who holds what, and what it is predicted to cost."""
    share = compute_share(cluster, plan.ranks)
    memory = dict(zip(plan.ranks, plan.predicted.peak_memory_bytes, strict=True)) if plan.predicted else {}
    rows = []
    for s, (stage, cost) in enumerate(zip(plan.stages, stage_costs(profile, plan), strict=True)):
        names = [layer.name for layer in profile.layers[stage.start : stage.stop]]
        speed = min(share[rank] for rank in stage.ranks)
        weights = sum(layer.parameter_bytes for layer in profile.layers[stage.start : stage.stop])
        rows.append(
            {
                "stage": s,
                "layers": f"{names[0]} .. {names[-1]} ({len(names)})" if len(names) > 1 else names[0],
                "ranks": ",".join(map(str, stage.ranks)),
                "compute": f"{(cost.forward_seconds + cost.backward_seconds) / speed * 1e3:.2f} ms",
                "weights": megabytes(weights),
                "sends on": megabytes(cost.output_bytes) if s + 1 < plan.num_stages else "-",
                "all-reduce": _milliseconds(cluster.allreduce_seconds(weights, stage.ranks)),
                "memory": megabytes(memory[stage.ranks[0]]) if memory else "-",
            }
        )
    return tabulate(rows, headers="keys", disable_numparse=True)


def candidates_table(candidates: Sequence[Candidate], chosen: Plan) -> str:
    """The best plans by predicted speed, and what each loses against the best."""
    best = candidates[0].seconds
    shown = list(candidates[:NUM_CANDIDATES])
    shown += [c for c in candidates[NUM_CANDIDATES:] if c.origin != "exact" or c.plan == chosen]
    rows = [
        {
            "": "->" if candidate.plan == chosen else "",
            "plan": candidate.plan.name,
            "ranks": candidate.plan.num_ranks,
            "cuts after layer": _cuts(candidate.plan),
            "minibatch": _milliseconds(candidate.seconds),
            "loses": "" if candidate.seconds == best else f"{candidate.seconds / best - 1:.0%}",
            "bubble": f"{candidate.plan.predicted.bubble_fraction:.0%}" if candidate.plan.predicted else "-",
            "proposed by": candidate.origin,
        }
        for candidate in shown
    ]
    return tabulate(rows, headers="keys", disable_numparse=True)


def explain(plan: Plan, candidates: Sequence[Candidate], profile: ModelProfile, cluster: Cluster) -> str:
    """The plan and why it was chosen."""
    unused = cluster.num_ranks - plan.num_ranks
    lines = [
        f"plan {plan.name}: {plan.num_stages} stage(s) on {plan.num_ranks} of {cluster.num_ranks} ranks, "
        f"{plan.schedule}, {plan.num_microbatches} microbatches of {profile.samples} samples",
        "",
        plan_table(plan, profile, cluster),
        "",
        f"considered, by predicted time{_sharing(cluster)}:",
        "",
        candidates_table(candidates, plan),
    ]
    if unused and plan == candidates[0].plan:
        lines += ["", f"{unused} rank(s) stay unused: more would cost more than they bring"]
    return "\n".join(lines)


def compare_table(runs: Mapping[str, Mapping[str, Any]], reference: str) -> str:
    """Measured and predicted figures of several runs, and their ratios to the run called `reference`."""
    base = runs.get(reference)
    rows = []
    for name, run in runs.items():
        predicted = run.get("predicted_samples_per_second")
        row = {
            "run": name,
            "plan": run["plan"],
            "samples/s": f"{run['samples_per_second']:,.0f}",
            "predicted": f"{predicted:,.0f}" if predicted else "-",
        }
        if base is not None:
            row[f"vs {reference}"] = f"{run['samples_per_second'] / base['samples_per_second']:.2f}x"
            expected = base.get("predicted_samples_per_second")
            row["predicted "] = f"{predicted / expected:.2f}x" if predicted and expected else "-"
        row |= {
            "accuracy": _accuracy(run),
            "last loss": f"{run['loss_last']:.5f}",
            "p2p": megabytes(run["bytes_sent_p2p"] / run["updates"]),
            "all-reduced": megabytes(run["bytes_allreduced"] / run["updates"]),
        }
        rows.append(row)
    return (
        tabulate(rows, headers="keys", disable_numparse=True)
        + "\n(p2p and all-reduced: of all ranks, per update)"
    )


def megabytes(num_bytes: float) -> str:
    """A size for people, such as "1.25 MB"."""
    return f"{num_bytes / 1e6:.3g} MB"


def _sharing(cluster: Cluster) -> str:
    if cluster.compute_slots is None:
        return ""
    return f" (a host computes for {cluster.slots:.3g} of its {cluster.node_ranks or 1} ranks at once)"


def _accuracy(run: Mapping[str, Any]) -> str:
    accuracy = run["metrics"].get("accuracy")
    return "-" if accuracy is None else f"{accuracy:.2%}"


def _cuts(plan: Plan) -> str:
    return ", ".join(str(stage.stop - 1) for stage in plan.stages[:-1]) or "-"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"
