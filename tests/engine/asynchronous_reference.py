"""Reference for asynchronous training: one process, written from the papers' formulas alone.

PipeDream (SOSP 2019, section 3.3): minibatch b uses in stage s the weights after v_s(b) updates,

    w_s(u + 1) = w_s(u) - rate * m_s / m_0 * mean over the round of grad f_b(w_1(v_1(b)), ..., w_n(v_n(b)))

A round is m_s minibatches, one a replica. A replica that stashes h_s minibatches has completed the backwards
of floor(b / m_s) - h_s + 1 rounds. With vertical sync all stages use the version that the first stage used:
v_s(b) = floor(v_0(b) m_0 / m_s). 2BW (ICML 2021, section 3.1): w(t + 1) = w(t) - rate * grad f_t(w(t - 1)).
PipeMare (MLSys 2021, section 3.1) divides the rate by d_s^(1 - min(b / K, 1)) with b the first minibatch of
the round. The delay d_s is b / m_s - v_s(b) for a b where all rounds begin and the pipeline is full.

Predicted weights: minibatch b uses in stage s, instead of w_s(v) with v = v_s(b),

    w_s(v) - (u - v) * rate * d_s(v)

where u is the number of the update that b belongs to, floor(b / m_s) (b under 2BW). The rate is that of
update v, and d_s(v) is what the optimizer knows after v updates: SGD's momentum buffer in SpecTrain (Chen et
al. 2018), Adam's m^ / (sqrt(v^) + eps) in XPipe (Guan et al. 2019), 0 before the first update.

Where losses are scaled, minibatch b has the loss times S(b), and gradients are divided by that. A stage
whose gradients of a round are not finite leaves its update out, and no other stage does: torch.amp.GradScaler
with an optimizer a stage. With L the most minibatches in flight, max_s h_s m_s (2 under 2BW),

    S(b) = S(b - 1) / 2  if a stage has left out b - L and S(b - L) = S(b - 1),  else S(b - 1)
"""

import copy
import itertools
import math

import torch

from hybridpipe.model.rng import random_key


def in_flight(replicas):
    """Return h_s for each stage s: one minibatch at work, and its share of the next stage's stash."""
    held = [1]
    for mine, behind in zip(reversed(replicas[:-1]), reversed(replicas[1:]), strict=True):
        held.insert(0, 1 + -(-behind * held[0] // mine))
    return held


def versions_of(b, replicas, rule):
    """Return v_s(b) for each stage s."""
    if rule == "2bw":
        return [max(0, b - 1)] * len(replicas)
    seen = [max(0, b // m - h + 1) for m, h in zip(replicas, in_flight(replicas), strict=True)]
    return [seen[0] * replicas[0] // m for m in replicas] if rule == "vertical" else seen


class ReferenceStage:
    """The newest weights of a stage, all of its versions, its optimizer and its scheduler."""

    def __init__(self, layers, optimizer, scheduler):
        self.newest, self.versions = copy.deepcopy(layers), [copy.deepcopy(layers)]
        self.directions = [None]  # d_s(v), and the rate with it
        parameters = list(self.newest.parameters())
        self.optimizer = optimizer(parameters) if parameters else None
        self.scheduler = scheduler(self.optimizer) if scheduler and parameters else None

    def drain(self):
        """Forget all versions but the newest, as no minibatch is in flight."""
        self.versions, self.directions = self.versions[-1:], self.directions[-1:]

    def add_gradients(self, used, size):
        """Add the gradients of the layers `used`, which ran one of the `size` minibatches of an update."""
        for mine, other in zip(self.newest.parameters(), used.parameters(), strict=True):
            mine.grad = other.grad / size + (0 if mine.grad is None else mine.grad)

    def update(self, factor, size):
        """Step with the learning rate times `factor` if gradients are finite; keep the new version.

        Returns:
            True if the step was left out.
        """
        gradients = [p.grad for p in self.newest.parameters()]
        overflows = not all(bool(gradient.isfinite().all()) for gradient in gradients)
        if overflows:
            self.optimizer.zero_grad()
        elif self.optimizer is not None:
            rates = [group["lr"] for group in self.optimizer.param_groups]
            for group in self.optimizer.param_groups:
                group["lr"] *= factor
            self.optimizer.step()
            self.optimizer.zero_grad()
            for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
        for _ in range(size if self.scheduler else 0):
            self.scheduler.step()
        self.versions.append(copy.deepcopy(self.newest))
        self.directions.append(self.direction())
        return overflows

    def direction(self):
        """Return each parameter's rate times d_s of the newest version."""
        found = {}
        for group in [] if self.optimizer is None else self.optimizer.param_groups:
            for parameter in group["params"]:
                state = self.optimizer.state[parameter]
                if "exp_avg" in state:
                    t, (b1, b2) = state["step"].item(), group["betas"]
                    size = (state["exp_avg_sq"] / (1 - b2**t)).sqrt() + group["eps"]
                    direction = state["exp_avg"] / (1 - b1**t) / size
                else:
                    direction = state.get("momentum_buffer")
                direction = torch.zeros_like(parameter) if direction is None else direction
                found[parameter] = group["lr"] * direction
        return [found[parameter] for parameter in self.newest.parameters()]

    def used(self, version, updates, factor):
        """Return a copy of the layers with a version's weights, moved by `updates` more updates.

        Args:
            factor: on the learning rate.
        """
        layers = copy.deepcopy(self.versions[version])
        if updates and self.directions[version] is not None:
            with torch.no_grad():
                for parameter, along in zip(layers.parameters(), self.directions[version], strict=True):
                    parameter -= updates * factor * along
        return layers


def scale_lag(replicas, rule):
    """Return L of the formula above."""
    return 2 if rule == "2bw" else max(h * m for h, m in zip(in_flight(replicas), replicas, strict=True))


def backward(stages, microbatches, loss, seed, step, scale, low=None):
    """Run a minibatch forward and backward through the stages and return its loss.

    Args:
        low: autocast's type in the forward; by default there is none.
    """
    layers = [layer for stage in stages for layer in stage]
    samples = sum(len(targets) for _, targets in microbatches)
    total = 0.0
    for m, (value, targets) in enumerate(microbatches):
        with torch.autocast("cpu", low, enabled=low is not None):
            for i, layer in enumerate(layers):
                torch.manual_seed(random_key(seed, step, m, i))
                value = layer(value)
        share = loss(value if low is None else value.float(), targets) * len(targets) / samples
        (share * scale).backward()
        total += share.item()
    return total


def rate_factors(replicas, rule, first, rate_scaled, warm_up):
    """Return the factor on each stage's learning rate in the update whose first minibatch is `first`."""
    if rule == "2bw":
        return [1.0] * len(replicas)
    full = 100 * math.lcm(*replicas)
    delays = [full // m - v for m, v in zip(replicas, versions_of(full, replicas, rule), strict=True)]
    scales = [m / replicas[0] if rate_scaled else 1.0 for m in replicas]
    power = 1 - min(first / warm_up, 1) if warm_up else 0
    return [scale / max(delay, 1) ** power for scale, delay in zip(scales, delays, strict=True)]


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
    scale=1.0,
    low=None,
    predicts=False,
    drained=None,
):
    """Return the weights and losses after `minibatches`, each a list of microbatches (inputs, targets).

    Args:
        edges: stage s holds the layers edges[s] to edges[s + 1].
        optimizer: called with the parameters of a stage.
        rule: "pipedream", "vertical" or "2bw".
        scheduler: called with the optimizer of a stage; it steps once a minibatch.
        warm_up: K of PipeMare's formula above; 0 turns it off.
        scale: S(0), a power of two.
        low: autocast's type.
        predicts: weights are predicted.
        drained: minibatches, after each as many of which the pipeline is drained; by default none are.
    """
    stages = [ReferenceStage(model[a:b], optimizer, scheduler) for a, b in itertools.pairwise(edges)]
    rounds = [1] * len(stages) if rule == "2bw" else replicas
    losses, scales, left_out, lag = [], [], set(), scale_lag(replicas, rule)
    total = drained or len(minibatches)
    for step, microbatches in enumerate(minibatches):
        b = step % total
        if b == 0:
            for stage in stages:
                stage.drain()
        if step - lag in left_out and scales[step - lag] == scale:
            scale /= 2
        scales.append(scale)
        versions = versions_of(b, replicas, rule)
        used = []
        for s, (stage, v) in enumerate(zip(stages, versions, strict=True)):
            u = b // rounds[s] if predicts else v
            factor = rate_factors(replicas, rule, step - b + v * rounds[s], rate_scaled, warm_up)[s]
            used.append(stage.used(v, u - v, factor))
        losses.append(backward(used, microbatches, loss, seed, step, scale, low))
        for s, stage in enumerate(stages):
            first = b // rounds[s] * rounds[s]
            size = min(rounds[s], total - first)
            stage.add_gradients(used[s], size * scale)
            if b == first + size - 1:
                first += step - b
                factor = rate_factors(replicas, rule, first, rate_scaled, warm_up)[s]
                if stage.update(factor, size):
                    left_out |= set(range(first, first + size))
    return [parameter for stage in stages for parameter in stage.newest.parameters()], losses
