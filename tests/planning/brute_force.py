"""Brute force: the formula of `cost.formula` anew, for all cuts and placements of small instances."""

import itertools
import math
import random
from collections import Counter
from dataclasses import replace

from hybridpipe.planning.cluster import Cluster, Collective, Level
from hybridpipe.planning.layer_parts import ExpertsProfile, SumsProfile
from hybridpipe.planning.plan import Variant
from hybridpipe.planning.profile import JoinedProducts, LayerProfile, ModelProfile
from hybridpipe.planning.schedules.registry import ASYNCHRONOUS


class Reference:
    """Seconds of all plans of one instance by the docstring's formula; infinite where one does not fit.

    Args:
        recompute: under a limit every stage may recompute or not, whether it must or not.
        zero: "auto": the replicas of every stage may shard their update or not, by either reduction.
    """

    def __init__(self, profile, cluster, num_microbatches, schedule, recompute, zero=0):
        self.profile, self.cluster = profile, cluster
        self.M, self.schedule = num_microbatches, schedule
        again = (False, True) if recompute and cluster.memory_bytes is not None else (False,)
        sharing = (
            [(0, False), (1, False), (1, True), (2, False), (2, True)] if zero == "auto" else [(0, False)]
        )
        if schedule in ASYNCHRONOUS:
            sharing = [each for each in sharing if each[0] < 2]
        self.ways = [Variant(*each, *shared) for each, shared in itertools.product(zip(again), sharing)]
        if any(one.experts for one in profile.layers) and schedule not in ASYNCHRONOUS:
            self.ways += [way._replace(experts=True) for way in self.ways if way.zero < 2]
        self.load = self.machine_speed(profile.load, shards=1) if cluster.compute_speeds else 1.0

    def layers(self, start, stop, m, way):
        """The layers as a replica has them; None where experts cannot be split as the way has them."""
        layers = self.profile.layers[start:stop]
        if not way.experts:
            return layers
        sizes = [len(tokens) for one in layers if one.experts for tokens in one.experts.tokens]
        if not sizes or any(size % m for size in sizes):
            return None
        return [one if one.experts is None else self.part_of(one, m) for one in layers]

    def part_of(self, one, m):
        experts, most, total = one.experts, 0, 0
        for tokens in experts.tokens:
            parts = [
                sum(tokens[i] for i in range(len(tokens)) if i * m // len(tokens) == r) for r in range(m)
            ]
            most, total = most + max(parts), total + sum(parts)
        tried = next((seconds for count, seconds in experts.parts if count == m), 1.0)
        factor = 1 + experts.share * (tried * (most * m / total if total else 1) - 1)
        part = math.ceil(experts.parameter_bytes / m)
        held = one.parameter_bytes - experts.parameter_bytes + part
        joined = one.joined and replace(one.joined, backward_seconds=one.joined.backward_seconds * factor)
        return replace(
            one,
            forward_seconds=one.forward_seconds * factor,
            backward_seconds=one.backward_seconds * factor,
            input_seconds=None if one.input_seconds is None else one.input_seconds * factor,
            weight_seconds=None if one.weight_seconds is None else one.weight_seconds * factor,
            accumulate_seconds=one.accumulate_seconds * factor,
            parameter_bytes=held,
            largest_bytes=None if one.largest_bytes is None else min(one.largest_bytes, held),
            update_seconds=one.update_seconds * (held / one.parameter_bytes if one.parameter_bytes else 1),
            joined=joined,
            experts=replace(experts, parameter_bytes=part, replicas=m),
        )

    def tokens(self, ranks, layers):
        """Seconds of the exchanges of a microbatch: five calls a module, and tokens four times."""
        m, calls = len(ranks), sum(len(one.experts.tokens) for one in layers if one.experts)
        num_bytes = sum(one.experts.token_bytes for one in layers if one.experts)
        latency = rate = 0.0
        for a in ranks:
            levels = [self.cluster.levels[self.crossed(a, b)] for b in ranks if b != a]
            latency = max(latency, sum(level.latency_seconds for level in levels))
            rate = max(rate, sum(1 / level.bandwidth for level in levels) / m)
        for i, level in enumerate(self.cluster.levels):
            below = self.cluster.levels[i - 1].ranks if i else 1
            for unit in {rank // below for rank in ranks} if level.shared_bandwidth else ():
                inside = sum(rank // below == unit for rank in ranks)
                rate = max(rate, inside * (m - inside) / m / level.shared_bandwidth)
        return 5 * calls * latency + 4 * num_bytes * rate

    def sums(self, layers, again):
        """Seconds of a microbatch's sums over shards; recomputing makes those of the forward once more."""
        t, level = self.cluster.shards, self.cluster.levels[0]
        rate = min(level.bandwidth, level.shared_bandwidth or math.inf)
        sums = [one.sums for one in layers if one.sums]
        count = sum((1 + again) * each.forward + each.backward for each in sums)
        num_bytes = sum((1 + again) * each.forward_bytes + each.backward_bytes for each in sums)
        return (t - 1) * (2 * count * level.latency_seconds + 2 * num_bytes / t / rate)

    def machine_speed(self, active, shards=None):
        speeds = self.cluster.compute_speeds
        if speeds is None:
            return min(1.0, (self.cluster.node_ranks or 1) / active)
        active *= shards or self.cluster.shards
        return speeds[active - 1] if active <= len(speeds) else speeds[-1] * len(speeds) / active

    def crossed(self, a, b):
        return next(i for i, level in enumerate(self.cluster.levels) if a // level.ranks == b // level.ranks)

    def speeds(self, placement):
        active = Counter(rank // (self.cluster.node_ranks or 1) for ranks in placement for rank in ranks)
        relative = self.cluster.relative_speed or [1.0] * self.cluster.num_ranks
        return [
            min(relative[r] * self.machine_speed(active[r // (self.cluster.node_ranks or 1)]) for r in ranks)
            * (self.cluster.replicated_speed if len(ranks) > 1 else 1)
            for ranks in placement
        ]

    def rings(self, ranks):
        """Latency and seconds per byte of an all-reduce, a reduce-scatter and an all-gather."""
        m = len(ranks)
        if m == 1:
            return [(0.0, 0.0)] * 3
        level = self.cluster.levels[max(self.crossed(a, b) for a in ranks for b in ranks)]
        bandwidth = min(level.bandwidth, level.shared_bandwidth or math.inf)
        steps, half = (m - 1) * level.latency_seconds, (m - 1) / m
        found = [(2 * steps, 2 * half / bandwidth), (steps, half / bandwidth), (steps, half / bandwidth)]
        if level.allreduce:
            start, rate = level.allreduce.latency_seconds, level.allreduce.bandwidth
            found[0] = found[1] = start + level.allreduce.wait_seconds, 2 * half / rate
            found[2] = start / 2, half / rate
        for i, measured in ((1, level.reduce_scatter), (2, level.all_gather)):
            if measured:
                found[i] = measured.latency_seconds + measured.wait_seconds, half / measured.bandwidth
        return found

    def cut(self, ranks, behind):
        """Latency, seconds a byte amid a round, and seconds a byte that the busiest link is occupied."""
        routes = [
            (ranks[b % len(ranks)], behind[b % len(behind)]) for b in range(math.lcm(len(ranks), len(behind)))
        ]
        levels = [self.cluster.levels[self.crossed(a, b)] for a, b in routes]
        after_first = 0 if self.schedule in ASYNCHRONOUS else 1
        busy = Counter()
        for a, b in routes:
            i = self.crossed(a, b)
            below = self.cluster.levels[i - 1].ranks if i else 1
            if self.cluster.levels[i].shared_bandwidth:
                busy[i, "out", a // below] += self.M / len(routes)
                busy[i, "in", b // below] += self.M / len(routes)
        slowest = max(1 / level.bandwidth for level in levels)
        fewest = min(len(ranks), len(behind))
        a_round = len(ranks) if after_first == 0 else min(self.M, len(ranks))
        handled = self.M / fewest if after_first == 0 else math.ceil(self.M / fewest) - 1
        links = [
            max(0.0, count - after_first) / self.cluster.levels[i].shared_bandwidth
            for (i, _, _), count in busy.items()
        ]
        together = [
            count * a_round / self.M / self.cluster.levels[i].shared_bandwidth
            for (i, _, _), count in busy.items()
        ]
        way = max([math.ceil(a_round / len(behind)) * slowest, *together])
        return max(level.latency_seconds for level in levels), way, max([handled * slowest, *links])

    def in_flight(self, placement):
        found, held = [], 0
        for m in map(len, reversed(placement)):
            mine = math.ceil(self.M / m)
            held_each = 1 + math.ceil(held / m)
            count = {
                "gpipe": mine,
                "pipedream": held_each,
                "pipedream-2bw": min(held_each, math.ceil(2 * self.M / m)),
            }.get(self.schedule, min(mine, held_each))
            found.insert(0, count)
            held = m * count
        return found

    def per_update(self, m):
        return 1 if self.schedule == "pipedream" else math.ceil(self.M / m)

    def products(self, one, n):
        """Sizes of a layer's products of n microbatches, the last one last; none where it makes none."""
        if one.joined is None or self.schedule not in ("1f1b", "gpipe"):
            return []
        sizes = [one.joined.microbatches] * (n // one.joined.microbatches)
        return [*sizes, n - sum(sizes)] if sum(sizes) < n else sizes

    def product_seconds(self, one, size):
        return one.joined.product_seconds + size * one.joined.microbatch_seconds

    def backward(self, one, n):
        """The mean over n microbatches, but for the last product."""
        if sizes := self.products(one, n):
            before = sum(self.product_seconds(one, size) for size in sizes[:-1])
            return one.joined.backward_seconds + before / n
        if self.schedule == "zero-bubble":
            rest = one.backward_seconds - self.weights_half(one)
            return (rest if one.input_seconds is None else one.input_seconds) + self.weight_seconds(one, n)
        return ((n - 1) * one.backward_seconds + one.backward_seconds - one.accumulate_seconds) / n

    def last_product(self, one, n):
        return sum(self.product_seconds(one, size) for size in self.products(one, n)[-1:])

    def fits(self, start, stop, m, stashes, memory, way):
        layers, again, zero = self.layers(start, stop, m, way), way.recompute, way.zero
        if layers is None:
            return False
        weights = sum(one.parameter_bytes for one in layers)
        own = sum(one.experts.parameter_bytes for one in layers if one.experts) if way.experts else 0
        state = ((weights - own) / (m if zero else 1) + own) * self.profile.state_factor
        gradients = weights
        if zero == 2:  # a share, and whole ones of three buckets
            bucket = max(2**21, *map(largest, layers))
            gradients = weights / m + min(weights, 3 * bucket)
        if way.scatter:  # the sums are new memory
            gradients += (
                min(weights, 3 * max(2**21, *map(largest, layers))) if zero == 2 else weights - own
            ) / m
        peak = round(weights * (1 + self.profile.copied_factor) + state + gradients)
        if m > 1:  # Horovod's buffer, and MPI's room for a whole tensor or two parts of m
            buffer = min(weights, 2**21)
            peak += buffer + round(2 * max(buffer, *map(largest, layers)) / m)
        peak += {"pipedream": stashes - 1, "pipedream-2bw": 1}.get(self.schedule, 0) * weights
        together = 1 if zero == 2 else self.per_update(m)
        rows = [max([0, *self.products(one, together)]) * kept(one) for one in layers]
        peak += sum(rows)
        peak += max(0, *(self.passing(layers[i:], rows[i], together) for i in range(len(layers))))
        received = self.profile.layers[start - 1].output_bytes if start else 0
        sent = layers[-1].output_bytes if stop < self.profile.num_layers else 0
        peak += 2 * received + 2 * sent + 2 * max(received, sent)
        inside = sum(one.activation_bytes for one in layers) + layers[-1].output_bytes
        peak += stashes * received + inside if again else stashes * (received + inside)
        return peak <= memory

    def passing(self, layers, rows, together):
        """What the first layer's passes need for the moment, less what the later ones have freed."""
        one, freed = layers[0], sum(later.activation_bytes for later in layers[1:])
        if one.workspace_bytes is None:
            return -freed
        return one.workspace_bytes + (together > 1) * (rows or largest(one)) - freed

    def best(self, placement):
        """The least seconds of all cuts and ways to run stages, for stages on these ranks."""
        n, stages = self.profile.num_layers, len(placement)
        speeds, rings = self.speeds(placement), [self.rings(ranks) for ranks in placement]
        links = [self.cut(a, b) for a, b in itertools.pairwise(placement)]
        stashes = self.in_flight(placement)
        memory = self.cluster.memory_bytes
        limit = [
            math.inf
            if memory is None
            else min(memory[r] for r in ranks)
            if isinstance(memory, tuple)
            else memory
            for ranks in placement
        ]
        best = math.inf
        for inner in itertools.combinations(range(1, n), stages - 1):
            cuts = (0, *inner, n)
            each = ((cuts[s], cuts[s + 1], len(placement[s]), stashes[s], limit[s]) for s in range(stages))
            fitting = [
                [
                    way
                    for way in self.ways
                    if stage[2] > 1 or not (way.zero or way.experts)
                    if self.fits(*stage, way)
                ]
                for stage in each
            ]
            for ways in itertools.product(*fitting):
                best = min(best, self.seconds(cuts, placement, speeds, rings, links, ways))
        return best

    def seconds(self, cuts, placement, speeds, rings, links, variants):
        slowest, ways, after, replicas = 0.0, [], [], list(map(len, placement))
        for s, m in enumerate(replicas):
            layers = self.layers(cuts[s], cuts[s + 1], m, variants[s])
            edges = [e for e in cuts[s : s + 2] if 0 < e < self.profile.num_layers]
            forward = sum(one.forward_seconds for one in layers) * self.load
            n, zero = self.per_update(m), variants[s].zero
            backward = sum(self.backward(one, n) for one in layers) * self.load
            last = sum(self.last_product(one, n) for one in layers) * self.load / speeds[s]
            if zero == 2 and self.schedule != "zero-bubble":  # each backward has all of its products
                whole = [
                    one.joined.backward_seconds + self.product_seconds(one, 1)
                    if self.products(one, n)
                    else self.backward(one, n)
                    for one in layers
                ]
                backward, last = sum(whole) * self.load, 0.0
            backward += variants[s].recompute * forward
            weights = sum(one.parameter_bytes for one in layers)
            handling = sum(
                2 * self.cluster.message_seconds + sum(self.sizes(e)) * self.cluster.message_seconds_per_byte
                for e in edges
            )
            w = (forward + backward + handling) / speeds[s] + self.sums(layers, variants[s].recompute)
            reduced = weights
            if variants[s].experts:
                w += self.tokens(placement[s], layers)
                reduced -= sum(one.experts.parameter_bytes for one in layers if one.experts)
            g = sum(self.weight_seconds(one, n) for one in layers) * self.load / speeds[s]
            hides = backward / speeds[s] + last
            if self.schedule == "zero-bubble":
                hides = g
            elif s > 0:  # and the sending of the gradient
                returned = self.sizes(cuts[s])[1] * self.cluster.message_seconds_per_byte
                hides += (self.cluster.message_seconds + returned) / speeds[s]
            start, per_byte = rings[s][variants[s].scatter]
            a = start + per_byte * reduced if reduced else 0.0
            e = a - self.cluster.overlap * min(a, hides)
            u = sum(one.update_seconds for one in layers) * self.load / speeds[s]
            if zero:
                u = u / m + (rings[s][2][0] + rings[s][2][1] * reduced if reduced else 0.0)
            rounds = math.ceil(self.M / m) - 1
            between = rounds * e if zero == 2 else 0.0
            ways.append(w)
            after.append(0.0)
            if self.schedule == "pipedream":
                slowest = max(slowest, (w + e + u) / m)
            elif self.schedule == "pipedream-2bw":
                slowest = max(slowest, math.ceil(self.M / m) * w + e + u)
            elif self.schedule == "zero-bubble":
                ways[-1] = max(0, w - 2 * g)
                after[-1] = e + u
                slowest = max(slowest, math.ceil(self.M / m) * w - max(0, w - 2 * g) + between + e + u)
            else:
                held_up = last if s > 0 and m > 1 else 0.0
                ways[-1] += held_up
                after[-1] = last - held_up + e + u
                slowest = max(slowest, rounds * w + between + after[-1])
        for s, (edge, (latency, per_byte, busy)) in enumerate(zip(cuts[1:-1], links)):
            sizes = self.sizes(edge)
            slowest = max(slowest, busy * (sum(sizes) if self.schedule == "gpipe" else max(sizes)))
            ways[s] += 2 * latency + per_byte * sum(self.sizes(edge))
        for s, m in enumerate(replicas):
            before, behind = (self.sizes(e) if 0 < e < cuts[-1] else (0, 0) for e in cuts[s : s + 2])
            fastest = max(level.bandwidth for level in self.cluster.levels)
            port = max(behind[0] + before[1], before[0] + behind[1]) / fastest
            count = self.M / m if self.schedule in ASYNCHRONOUS else math.ceil(self.M / m) - 1
            slowest = max(slowest, port * count + after[s])
            slowest = max(slowest, self.round_trips(m, sum(replicas[s + 1 :])) * sum(ways[s:]))
        return slowest if self.schedule in ASYNCHRONOUS else sum(ways) + slowest

    def round_trips(self, m, behind):
        """How often a microbatch's way from a stage to the end and back is waited for in a minibatch."""
        held = 1 + math.ceil(behind / m)
        if self.schedule == "pipedream-2bw":
            held = min(held, math.ceil(2 * self.M / m))
        if self.schedule in ASYNCHRONOUS:
            return self.M / held / m
        rounds = math.ceil(self.M / m)
        return 0.0 if self.schedule == "gpipe" else rounds / min(held, rounds) - 1

    def weights_half(self, one):
        half = one.backward_seconds / 2 if one.weight_seconds is None else one.weight_seconds
        return half if one.parameter_bytes else 0.0

    def weight_seconds(self, one, n):
        return max(0.0, self.weights_half(one) - one.accumulate_seconds / n)

    def sizes(self, edge):
        one = self.profile.layers[edge - 1]
        return one.output_bytes, one.output_bytes if one.gradient_bytes is None else one.gradient_bytes


def largest(one):
    return one.parameter_bytes if one.largest_bytes is None else one.largest_bytes


def kept(one):
    return one.joined.kept_bytes if one.joined else 0


def every_placement(ranks, max_stages, max_replicas, used=()):
    """Every way to give stages disjoint sets of these ranks."""
    for size in range(1, min(len(ranks), max_replicas) + 1):
        for first in itertools.combinations(ranks, size):
            yield (first,)
            rest = [rank for rank in ranks if rank not in first]
            if max_stages > 1:
                for others in every_placement(rest, max_stages - 1, max_replicas):
                    yield (first, *others)


def random_instance(seed):
    """Few layers and ranks, and everything that can differ."""
    draw = random.Random(seed)
    figure = (lambda: draw.randint(0, 4)) if seed % 5 == 0 else draw.random  # small integers: exact ties
    num_ranks = draw.choice([1, 2, 3, 3, 4, 4, 4, 4, 5])
    num_layers = draw.randint(1, 4 if num_ranks == 5 else 5)
    profile = ModelProfile(
        tuple(random_layer(draw, figure, str(i)) for i in range(num_layers)),
        samples=8,
        state_factor=draw.choice([0.0, 1.0, 0.5]),
        load=draw.choice([1, 1, 2]),
    )
    cluster = random_cluster(draw, figure)
    schedule = draw.choice(["1f1b", "1f1b", "gpipe", "pipedream", "zero-bubble", "pipedream-2bw"])
    if schedule == "zero-bubble":  # a peak hangs on the stages before
        cluster = replace(cluster, memory_bytes=None)
    options = {
        "num_microbatches": 1 if schedule == "pipedream" else draw.choice([1, 2, 3, 4, 8, 16, 17]),
        "schedule": schedule,
        "recompute": draw.random() < 0.3,
    }
    world = cluster.num_ranks
    ranks = sorted(draw.sample(range(world), num_ranks) if draw.random() < 0.3 else range(num_ranks))
    return profile, cluster, options, ranks, draw.choice([None, None, None, 1, 2])


def limited_instance(seed):
    """An instance with fast links whose stages may recompute, under a limit that activations decide about."""
    profile, cluster, options, ranks, max_replicas = random_instance(seed)
    draw = random.Random(-1 - seed)
    schedule = draw.choice(["1f1b", "1f1b", "1f1b", "gpipe", "pipedream", "pipedream-2bw"])
    count = 1 if schedule == "pipedream" else draw.choice([2, 3, 4, 8, 16, 17])
    layers = tuple(
        replace(
            one,
            parameter_bytes=draw.randint(0, 10**7),
            activation_bytes=draw.randint(0, 2 * 10**7),
            workspace_bytes=draw.choice([None, draw.randint(0, 5 * 10**6)]),
            largest_bytes=draw.choice([None, draw.randint(0, 10**6)]),
        )
        for one in profile.layers
    )
    levels = tuple(replace(level, bandwidth=100 * level.bandwidth) for level in cluster.levels)
    whole = sum(2 * one.parameter_bytes + 2 * one.activation_bytes for one in layers)  # about, on one rank
    memories = tuple(int(whole * draw.uniform(0.3, 0.9)) for _ in range(cluster.num_ranks))
    memory = draw.choice([memories[0], memories[0], memories])
    options = {"num_microbatches": count, "schedule": schedule, "recompute": True}
    limited = replace(cluster, levels=levels, memory_bytes=memory, compute_speeds=None)
    return replace(profile, layers=layers), limited, options, ranks, max_replicas


def sharded_instance(seed):
    """An instance whose replicas may shard their update, under a limit or without one."""
    profile, cluster, options, _, max_replicas = limited_instance(seed)
    draw = random.Random(-(10**6) - seed)
    num_ranks = draw.choice([2, 2, 3, 3, 4])

    def measured():
        figures = Collective(
            10 ** draw.uniform(6, 9), 0.01 * draw.random(), wait_seconds=0.01 * draw.random()
        )
        return draw.choice([None, figures])

    # Where gradients are sharded three buckets of them are whole, so ten layers may be leaner than one.
    count = 10 if num_ranks == 2 else len(profile.layers[:4])
    layers = tuple(
        replace(
            profile.layers[i % len(profile.layers)],
            parameter_bytes=draw.choice([0, 1, 1]) * draw.randint(8 * 10**7, 10**8),
            update_seconds=draw.choice([0.1, 5.0]) * draw.random(),
        )
        for i in range(count)
    )
    levels = tuple(
        replace(level, allreduce=measured(), reduce_scatter=measured(), all_gather=measured())
        for level in cluster.levels
    )
    schedule = draw.choice(["1f1b", "1f1b", "1f1b", "gpipe", "zero-bubble", "pipedream", "pipedream-2bw"])
    whole = sum(4 * one.parameter_bytes + 2 * one.activation_bytes for one in layers)
    limit = (
        None
        if schedule == "zero-bubble"
        else draw.choice([None, int(whole * draw.uniform(0.2, 0.9)), int(whole * draw.uniform(0.6, 0.9))])
    )
    cluster = replace(cluster, levels=levels, memory_bytes=limit)
    options |= {"schedule": schedule, "zero": "auto", "recompute": draw.random() < 0.5}
    options["num_microbatches"] = 1 if schedule == "pipedream" else draw.choice([1, 2, 3, 8, 17])
    factors = {"state_factor": draw.choice([1.0, 2.0]), "copied_factor": draw.choice([0.0, 0.5])}
    profile = replace(profile, layers=layers, **factors)
    return profile, cluster, options, range(num_ranks), max_replicas


def experts_instance(seed):
    """An instance with experts in some layers, under a limit or without one."""
    make = random.Random(10**7 + seed).choice([random_instance, limited_instance])
    profile, cluster, options, ranks, max_replicas = make(seed)
    draw = random.Random(-(10**7) - seed)

    def experts(one):
        sizes = draw.choice([(), (2,), (4,), (4, 2), (6,)])
        if not sizes:
            return one
        num_bytes = draw.randint(10**6, 10**7)
        tokens = tuple(tuple(draw.randint(3, 9) for _ in range(size)) for size in sizes)
        split = ExpertsProfile(draw.randint(0, num_bytes), draw.random(), draw.randint(0, 10**4), tokens)
        split = replace(split, parts=draw.choice([(), ((2, draw.random()), (3, 1.5))]))
        return replace(one, parameter_bytes=num_bytes, experts=split)

    zero = draw.choice([0, 0, "auto"]) if len(ranks) < 4 else 0
    if options["schedule"] in ASYNCHRONOUS:
        options |= {"schedule": "1f1b", "num_microbatches": draw.choice([1, 2, 3, 8, 17])}
    profile = replace(profile, layers=tuple(map(experts, profile.layers)))
    levels = tuple(replace(one, latency_seconds=one.latency_seconds / 100) for one in cluster.levels)
    return profile, replace(cluster, levels=levels), options | {"zero": zero}, ranks, max_replicas


def shards_instance(seed):
    """An instance whose ranks stand for shards that sum, under a limit or without one."""
    draw = random.Random(10**8 + seed)
    profile, cluster, options, ranks, max_replicas = draw.choice([random_instance, limited_instance])(seed)

    def summing(one):
        made = (draw.randint(0, 3), draw.randint(0, 3), draw.randint(0, 10**5), draw.randint(0, 10**5))
        return replace(one, sums=SumsProfile(*made))

    if options["schedule"] in ASYNCHRONOUS:
        options |= {"schedule": "1f1b", "num_microbatches": draw.choice([1, 2, 3, 8, 17])}
    profile = replace(profile, layers=tuple(map(summing, profile.layers)))
    levels = tuple(replace(one, latency_seconds=one.latency_seconds / 100) for one in cluster.levels)
    pooled = replace(cluster, levels=levels, shards=draw.choice([2, 4]))
    return profile, pooled, options, ranks, max_replicas


def random_layer(draw, figure, name):
    backward = 2 * figure()
    weight = draw.choice([None, draw.random() * backward])
    joined = JoinedProducts(
        figure(), figure(), figure(), draw.choice([2, 3, 100]), kept_bytes=draw.randint(0, 10**6)
    )
    return LayerProfile(
        name,
        figure(),
        backward,
        draw.choice([0, draw.randint(0, 10**6), draw.choice([1, 10**9]) * draw.randint(0, 10)]),
        draw.randint(0, 10**6),
        draw.randint(0, 10**6),
        0.1 * figure(),
        draw.choice([None, None, draw.randint(0, 2 * 10**6)]),
        weight_seconds=weight,
        input_seconds=None if weight is None else draw.choice([None, backward - draw.random() * weight]),
        accumulate_seconds=draw.choice([0.0, draw.random() * (backward if weight is None else weight)]),
        joined=draw.choice([None, joined]),
    )


def random_cluster(draw, figure):
    def allreduce():
        measured = Collective(10 ** draw.uniform(5, 8), 0.01 * figure(), wait_seconds=0.01 * figure())
        return draw.choice([None, None, measured])

    def shared():
        return draw.choice([None, None, 10 ** draw.uniform(4, 7)])

    node = draw.choice([1, 2, 2, 3])
    sizes = draw.choice([[6 * node], [node, 6 * node], [node, 2 * node, 6 * node]])
    levels = tuple(
        Level(str(size), size, 10 ** draw.uniform(4, 8), 0.05 * figure(), shared(), allreduce())
        for size in sizes
    )
    speeds = tuple(draw.choice([1.0, 0.5, 0.7]) for _ in range(sizes[-1]))
    memories = tuple(draw.randint(10**6, 10**7) for _ in range(sizes[-1]))
    return Cluster(
        levels,
        memory_bytes=draw.choice([None, None, draw.randint(10**6, 10**7), memories]),
        relative_speed=draw.choice([None, None, speeds]),
        node_ranks=draw.choice([None, node, 2]),
        compute_speeds=draw.choice(
            [None, (1.0, draw.uniform(0.4, 1)), tuple(draw.random() + 0.1 for _ in "123")]
        ),
        message_seconds=draw.choice([0.0, 0.1 * figure()]),
        message_seconds_per_byte=draw.choice([0.0, 1e-7 * figure()]),
        replicated_speed=draw.choice([1.0, 0.8]),
        overlap=draw.choice([1.0, 0.5, 0.0]),
    )
