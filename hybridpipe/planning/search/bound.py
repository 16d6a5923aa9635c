"""Bound: lower bounds of a plan's simulated seconds, by which a search skips plans that cannot be the best.

`formula.estimate` lets every rank and link work without a pause. Under pipedream the replicas of a first
stage pause, and the least length of the pause is known as well. An update ends in all of them at once, so all
start a round at one instant, and send their activations at one instant. Those for one receiver share its port
evenly, and none of them arrives before all could have. These steps therefore take at least

    F + A + u                                     one round
    (F + B) + x + q w' + (q - 1) a' + y + e + u   h - r rounds

    F B u w'    seconds: a minibatch's forward, backward and update in the first stage; its work in the second
    A e a'      the first stage's all-reduce; the part of it after the backward; the time after the work on a
                minibatch in the second stage
    x y         the second stage's wait for its first activation of a round; a gradient's way back
    h h' m k    minibatches that a replica of the first (second) stage holds (`in_flight`); replicas

The first sum is forward, all-reduce of a round before, and update. A starts with the round's activations at
best, and has half of its ranks' ports while messages are on them. Where h = 2 the gradients that answer the
activations are such messages, too, beyond those that pass during F and u. Its share is never less than a
half, so starting later spares no more than it costs.

The second sum is the way of a round's last minibatch, after which its replica forwards the one h rounds
later. The receiver goes through q minibatches of a round in between, in the order of 1F1B: its last backward
of a round comes after a forward r = ceil(k (h' - 1) / m) rounds later.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from hybridpipe.planning.cluster import PARTS_SENT, Cluster
from hybridpipe.planning.cost.estimate import estimates
from hybridpipe.planning.cost.formula import (
    StageCost,
    compute_share,
    measured_speed,
    plan_terms,
    reduction_of,
    stage_costs,
    stage_speed,
)
from hybridpipe.planning.cost.links import Floats, Ints
from hybridpipe.planning.plan import Plan
from hybridpipe.planning.profile import ModelProfile
from hybridpipe.planning.schedules.generators import UNLIMITED, ceil_div, until_backward

# A plan may be faster than the formula by this factor, and hardly ever by more, under other schedules and
# where ranks share processors only at times or links let bursts pass.
FASTER = 1.25


def least_seconds(plan: Plan, profile: ModelProfile, cluster: Cluster) -> Iterator[float]:
    """Yield lower bounds of a plan's simulated seconds of a minibatch, which hardly any simulation undercuts.

    The first is `estimate`, which overstates a cut with fast and slow routes, as it takes all for slow: of
    461 problems a search lost one plan to that, by 1.2 %. The further bounds: of 19,000 random plans
    none was faster over 240 rounds. `predict`, which simulates fewer rounds, was faster for one plan in a
    hundred where latencies are long. Where ranks wait for their messages, the bounds are those without
    waiting: the formula counts at both ends what ranks spend together.
    """
    if cluster.waits_for_messages:
        cluster = replace(cluster, waits_for_messages=False)
    costs = stage_costs(profile, plan, measured_speed(profile, cluster))
    found = estimates(plan, costs, cluster)
    has_bursts = any(level.burst_bytes for level in cluster.levels)
    if not plan.traits.whole_minibatch or has_bursts or not cluster.are_processors_private:
        yield found.closely / FASTER
        return
    yield found.unhindered
    if _goes_in_rounds(plan, costs, cluster):
        rounds = _Rounds(plan, costs, cluster)
        yield rounds.one_round() / plan.replicas[0]
        yield rounds.way_of_last() / plan.replicas[0]


def _goes_in_rounds(plan: Plan, costs: Sequence[StageCost], cluster: Cluster) -> bool:
    """True if the first stage's replicas start rounds together, and the second's are equally fast.

    Where the all-reduce can end before a backward does, replicas need not wait for each other.
    """
    if plan.num_stages == 1 or plan.replicas[0] == 1 or not costs[0].buckets:
        return False
    is_even = all(len(set(map(cluster.speed, stage.ranks))) == 1 for stage in plan.stages[:2])
    return is_even and math.isclose(costs[0].buckets[-1].fraction, 1.0)


class _Rounds:
    """Rounds of a plan's first stage, in the symbols of the header.

    Args:
        plan: under pipedream, with at least two stages.

    The attributes `receivers[round, replica]`, of the activations, and `levels`, which these cross, cover one
    period.
    """

    def __init__(self, plan: Plan, costs: Sequence[StageCost], cluster: Cluster) -> None:
        self.plan, self.cost, self.cluster = plan, costs[0], cluster
        terms = plan_terms(plan, costs, cluster)
        self.own, self.second = terms.of_stage(0), terms.of_stage(1)
        self.held, self.held_behind = until_backward(plan, UNLIMITED)[:2]
        self.ranks, behind = (np.array(stage.ranks) for stage in plan.stages[:2])
        self.m, self.k = len(self.ranks), len(behind)
        self.output_bytes, self.returned_bytes = map(
            float, (self.cost.output_bytes, self.cost.gradient_bytes)
        )
        self.receivers = behind[np.arange(math.lcm(self.m, self.k)).reshape(-1, self.m) % self.k]
        self.levels = self.levels_between(self.ranks, self.receivers)

    def one_round(self) -> float:
        """Return F + A + u, the mean of all rounds."""
        ranks = self.plan.stages[0].ranks
        speed = stage_speed(self.cluster, ranks, compute_share(self.cluster, self.plan.ranks))
        rest = self.cost.forward_seconds / speed + self.own.update
        index = self.cluster.level_index(min(ranks), max(ranks))  # where all-reduce and messages meet
        bandwidth = self.cluster.levels[index].bandwidth
        counts = [(self.levels[:, i :: self.k] == index).sum(axis=1) for i in range(min(self.k, self.m))]
        most_messages = np.max(counts, axis=0)  # for one receiver
        in_the_way = most_messages * self.output_bytes / bandwidth
        if self.held == 2:
            in_the_way += np.maximum(most_messages * self.returned_bytes / bandwidth - rest, 0.0)

        reduction = reduction_of(self.plan, 0)
        seconds_per_byte = self.cluster.ring(ranks, reduction).seconds_per_byte
        alone = seconds_per_byte * sum(bucket.num_bytes for bucket in self.cost.buckets)
        sent = 2 * (self.m - 1) / self.m * PARTS_SENT[reduction]
        rate = min(sent / seconds_per_byte, bandwidth)  # as in `resources.Machines.ring`
        share = min(1.0, bandwidth / 2 / rate)
        return rest + float(np.mean(np.minimum(alone / share, alone + in_the_way * (1 - share))))

    def way_of_last(self) -> float:
        """Return the mean seconds of a round's last minibatch on its way, divided by its number of rounds."""
        ahead = self.k * (self.held_behind - 1)  # minibatches forwarded before its backward
        last = (ahead - 1) % self.m  # the replica of the last of them
        first, count = last % self.k, last // self.k + 1  # up to it, with the same receiver
        levels = self.levels[:, first]
        together = (self.levels[:, first :: self.k] == levels[:, None]).sum(axis=1)
        wait = self.message_seconds(levels, together * self.output_bytes)
        home = self.levels_between(self.ranks[-1], self.receivers[:, last])
        back = self.message_seconds(home, self.returned_bytes)
        update = self.second.exposed + self.second.update
        at_second = count * self.second.work + (count - 1) * update
        seconds = self.own.work + self.own.after + at_second + float(np.mean(wait + back))
        return seconds / (self.held - ceil_div(ahead, self.m))

    def levels_between(self, ranks: Ints, others: Ints) -> Ints:
        """Return `Cluster.level_index` of many pairs."""
        sizes = np.array([level.ranks for level in self.cluster.levels])
        levels: Ints = (ranks[..., None] // sizes != others[..., None] // sizes).sum(axis=-1)
        return levels

    def message_seconds(self, levels: Ints, num_bytes: Floats | float) -> Floats:
        """Return the seconds of messages that cross these levels."""
        latency = np.array([level.latency_seconds for level in self.cluster.levels])
        bandwidth = np.array([level.bandwidth for level in self.cluster.levels])
        return latency[levels] + num_bytes / bandwidth[levels]
