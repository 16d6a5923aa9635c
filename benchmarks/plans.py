"""Plans of benchmarks: models cut into stages by the measured seconds of their layers."""

from collections.abc import Mapping, Sequence
from itertools import combinations, pairwise
from pathlib import Path

import jobs

from hybridpipe.files import read_profile
from hybridpipe.planning.cluster import Cluster
from hybridpipe.planning.cost.estimate import estimate
from hybridpipe.planning.plan import Plan, StageSpec
from hybridpipe.planning.profile import ModelProfile


def balanced(seconds: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """Return the cuts that make the longest stage as short as possible.

    Args:
        seconds: of each layer.
    """

    def longest(cuts: tuple[int, ...]) -> float:
        return max(sum(seconds[a:b]) for a, b in pairwise((0, *cuts, len(seconds))))

    return min(combinations(range(1, len(seconds)), num_stages - 1), key=longest)


def measured_cuts(
    task: str, num_stages: int, num_microbatches: int, environment: Mapping[str, str], out: Path
) -> tuple[int, ...]:
    """Return balanced cuts by the profile in `out`, which the first call measures and later ones reuse.

    The profile is measured in a job of its own, as the ways run, so that memory is equally fast: with huge
    pages and the same allocator.
    """
    folder = out / f"{num_microbatches}-microbatches"
    if not (folder / "profile.json").is_file():
        arguments = [task, "--microbatches", str(num_microbatches)]
        jobs.program("profile_layers", arguments, 1, folder, environment)
    seconds = [
        num_microbatches * (layer.forward_seconds + layer.backward_seconds) + layer.update_seconds
        for layer in read_profile(folder / "profile.json").layers
    ]
    return balanced(seconds, num_stages)


def best_cut(replicas: Sequence[int], profile: ModelProfile, cluster: Cluster, num_microbatches: int) -> Plan:
    """Return the plan with these replica counts that is the fastest by the closed formula."""
    cuts = combinations(range(1, profile.num_layers), len(replicas) - 1)
    plans = [
        Plan(
            tuple(map(StageSpec, (0, *inner), (*inner, profile.num_layers), replicas)),
            num_microbatches=num_microbatches,
        )
        for inner in cuts
    ]
    return min(plans, key=lambda plan: estimate(plan, profile, cluster))
