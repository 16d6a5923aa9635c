"""What asynchronous training means, in one process and from the formulas alone.

PipeDream (SOSP 2019, section 3.3): minibatch b uses in stage s the weights after v_s(b) updates,

    w_s(u + 1) = w_s(u) - rate * m_s / m_0 * mean over the round of grad f_b(w_1(v_1(b)), ..., w_n(v_n(b)))

where a round is m_s minibatches, one a replica, and a replica that stashes h_s minibatches has seen
floor(b / m_s) - h_s + 1 rounds come back. With vertical sync all stages take what the first one saw:
v_s(b) = floor(v_0(b) m_0 / m_s). 2BW (ICML 2021, section 3.1): w(t + 1) = w(t) - rate * grad f_t(w(t - 1)).
PipeMare (MLSys 2021, section 3.1) divides the rate by d_s^(1 - min(b / K, 1)), b the first minibatch of the
round, d_s = b / m_s - v_s(b) where all rounds begin and the pipeline is full.
"""

import copy
import itertools
import math

import torch
from torch import nn

from hybridpipe.model.rng import random_key


def in_flight(replicas):
    """A replica works on one minibatch, and keeps its part of those that the next stage holds."""
    held = [1]
    for mine, behind in zip(reversed(replicas[:-1]), reversed(replicas[1:]), strict=True):
        held.insert(0, 1 + -(-behind * held[0] // mine))
    return held


def seen_by(b, replicas, rule):
    """v_s(b) for each stage s."""
    if rule == "2bw":
        return [max(0, b - 1)] * len(replicas)
    seen = [max(0, b // m - h + 1) for m, h in zip(replicas, in_flight(replicas), strict=True)]
    return [seen[0] * replicas[0] // m for m in replicas] if rule == "vertical" else seen


def train(
    model,
    edges,
    replicas,
    minibatches,
    loss,
    optimizer,
    rule,
    seed=0,
    rate_scaled=True,
    scheduler=None,
    warm_up=0,
):
    """The weights and losses after `minibatches`, each a list of microbatches (inputs, targets).

    Args:
        edges: stage s holds the layers edges[s] to edges[s + 1].
        optimizer: called with the parameters of a stage.
        rule: "pipedream", "vertical" or "2bw".
        scheduler: called with the optimizer of a stage; it steps once a minibatch.
        warm_up: K above.
    """
    num_stages = len(replicas)
    newest = [copy.deepcopy(model[a:b]) for a, b in itertools.pairwise(edges)]
    history = [[copy.deepcopy(stage)] for stage in newest]
    optimizers = [optimizer(stage.parameters()) if list(stage.parameters()) else None for stage in newest]
    per_update = [1] * num_stages if rule == "2bw" else replicas
    schedulers = [scheduler(each) if scheduler and each else None for each in optimizers]
    full = 100 * math.lcm(*replicas)
    delays = [full // m - v for m, v in zip(per_update, seen_by(full, replicas, rule), strict=True)]
    losses = []
    for b, microbatches in enumerate(minibatches):
        seen = seen_by(b, replicas, rule)
        stages = [copy.deepcopy(history[s][seen[s]]) for s in range(num_stages)]
        samples = sum(len(targets) for _, targets in microbatches)
        losses.append(0.0)
        for m, (value, targets) in enumerate(microbatches):
            for i, layer in enumerate(nn.Sequential(*(layer for stage in stages for layer in stage))):
                torch.manual_seed(random_key(seed, b, m, i))
                value = layer(value)
            share = loss(value, targets) * len(targets) / samples
            share.backward()
            losses[-1] += share.item()
        for s, stage in enumerate(stages):
            first = b // per_update[s] * per_update[s]
            size = min(per_update[s], len(minibatches) - first)
            for mine, used in zip(newest[s].parameters(), stage.parameters(), strict=True):
                mine.grad = used.grad / size + (0 if mine.grad is None else mine.grad)
            if b == first + size - 1:
                if optimizers[s] is not None:
                    group = optimizers[s].param_groups[0]
                    rate = group["lr"]
                    if rule != "2bw" and rate_scaled:
                        group["lr"] *= replicas[s] / replicas[0]
                    if warm_up and delays[s]:
                        group["lr"] /= delays[s] ** (1 - min(first / warm_up, 1))
                    optimizers[s].step()
                    optimizers[s].zero_grad()
                    group["lr"] = rate
                for _ in range(size):
                    if schedulers[s] is not None:
                        schedulers[s].step()
                history[s].append(copy.deepcopy(newest[s]))
    return [parameter for stage in newest for parameter in stage.parameters()], losses
