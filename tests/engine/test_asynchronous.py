"""Asynchronous schedules in threads: the weights equal those of the papers' formulas.

The models have no dropout here, since threads share torch's generator; tests/mpi covers dropout.
"""

from collections import defaultdict
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from hybridpipe.optim.loss_scale import LossScale
from hybridpipe.optim.update import UpdateRule
from hybridpipe.stage.weights import WeightVersions
from tests.engine import asynchronous_reference
from tests.engine.helpers import Call, in_threads, make_plan
from tests.thinned import thinned

PLANS = ["1", "1-1", "1-1-1-1", "2-1", "1-2", "3-1", "2-2", "1-2-1", "3"]
OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "adam": partial(torch.optim.Adam, lr=0.01),
}
cross_entropy = nn.functional.cross_entropy


def make_model() -> nn.Sequential:
    torch.manual_seed(1)
    layers = [nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 5), nn.Linear(5, 3)]
    return nn.Sequential(*layers).double()


def make_data(count: int, size: int, last: int):
    torch.manual_seed(2)
    sizes = [size] * (count - 1) + [last]
    return [(torch.randn(n, 4, dtype=torch.float64), torch.randint(0, 3, (n,))) for n in sizes]


def compare(
    name,
    schedule,
    rule,
    optimizer,
    data,
    microbatch,
    num_microbatches,
    scaled=True,
    scheduler=None,
    warm_up=0,
    model=None,
    loss=cross_entropy,
    scale=None,
    **options,
):
    model = model or make_model()
    plan = make_plan(name, len(model), num_microbatches, schedule, **options)
    cut = [
        [(x[i : i + microbatch], y[i : i + microbatch]) for i in range(0, len(x), microbatch)]
        for x, y in data
    ]
    edges = [0, *(stage.stop for stage in plan.stages)]
    expected, losses = asynchronous_reference.train(
        model,
        edges,
        plan.replicas,
        cut,
        loss,
        optimizer,
        rule,
        rate_scaled=scaled,
        scheduler=scheduler,
        warm_up=warm_up,
        predicts=plan.predicts_weights,
        **({} if scale is None else {"scale": scale.value}),
    )
    update = UpdateRule(optimizer, scheduler, scale_learning_rate=scaled, delay_warm_up=warm_up)
    in_scale = {}
    if scale is not None:
        update, in_scale = replace(update, precision="fp16"), {"scale": scale}
    update.check(plan)
    result = in_threads(plan, model, data, microbatch, loss, rule=update, **in_scale)
    torch.testing.assert_close(result.parameters, expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(result.losses, losses, rtol=0, atol=1e-10)
    return result


@pytest.mark.parametrize("name, vertical_sync, optimizer", thinned(PLANS, [False, True], list(OPTIMIZERS)))
def test_pipedream(name, vertical_sync, optimizer):
    rule = "vertical" if vertical_sync else "pipedream"
    data = make_data(20, 4, last=3)  # 20 is no multiple of 3: the last round is short
    compare(name, "pipedream", rule, OPTIMIZERS[optimizer], data, 4, 1, vertical_sync=vertical_sync)


@pytest.mark.parametrize("name, num_microbatches, optimizer", thinned(PLANS, [1, 4, 6], list(OPTIMIZERS)))
def test_2bw(name, num_microbatches, optimizer):
    data = make_data(20, 2 * num_microbatches, last=1)
    compare(name, "pipedream-2bw", "2bw", OPTIMIZERS[optimizer], data, 2, num_microbatches)


# Each with the prediction that reads its state, and what else of an optimizer the formula meets.
PREDICTED = {
    "sgd": ("spectrain", OPTIMIZERS["sgd"]),
    "nesterov": (
        "spectrain",
        partial(torch.optim.SGD, lr=0.05, momentum=0.8, nesterov=True, weight_decay=1e-2),
    ),
    "dampened": ("spectrain", partial(torch.optim.SGD, lr=0.05, momentum=0.9, dampening=0.5, foreach=True)),
    "adam": ("xpipe", partial(torch.optim.Adam, lr=0.01, weight_decay=1e-2)),
    "adamw": ("xpipe", partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1, eps=1e-3)),
}


@pytest.mark.parametrize("name, optimizer", thinned(PLANS, list(PREDICTED)))
def test_predicted_weights(name, optimizer):
    prediction, factory = PREDICTED[optimizer]
    for schedule, rule, count in (("pipedream", "pipedream", 1), ("pipedream-2bw", "2bw", 3)):
        data = make_data(20, 6, last=1)
        compare(name, schedule, rule, factory, data, 6 // count, count, prediction=prediction)


@pytest.mark.parametrize("name, size, limit", [("1-2", 2, 1), ("1-4", 2, 1), ("1-3", 4, 2), ("1-3-2", 3, 1)])
def test_weights_are_predicted_before_an_update_that_comes_before_the_forward(name, size, limit):
    """With few in flight a replica's first forward of a minibatch may come after the update before it."""
    data, given = make_data(20, 2 * size, last=2 * size), {"prediction": "spectrain", "max_in_flight": limit}
    compare(name, "pipedream-2bw", "2bw", OPTIMIZERS["sgd"], data, 2, size, **given)


def two_rates(parameters):
    """The weights of a stage and its biases in groups of their own."""
    matrices, biases = ([p for p in parameters if (p.ndim > 1) == wide] for wide in (True, False))
    groups = [{"params": biases, "lr": 0.2, "momentum": 0.5}, {"params": matrices}]
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9)


@pytest.mark.parametrize("name", ["1-1-1-1", "1-2-1", "3-1"])
def test_predictions_follow_schedulers_warm_up_groups_limits_and_recomputation(name):
    data, given = make_data(20, 6, last=1), {"prediction": "spectrain", "scheduler": SCHEDULERS["one cycle"]}
    sgd = OPTIMIZERS["sgd"]
    compare(name, "pipedream", "pipedream", sgd, data, 6, 1, warm_up=12, **given)
    compare(name, "pipedream", "pipedream", sgd, data, 6, 1, recompute=True, **given)
    compare(name, "pipedream-2bw", "2bw", sgd, data, 2, 3, max_in_flight=2, **given)
    for schedule, rule, count in (("pipedream", "pipedream", 1), ("pipedream-2bw", "2bw", 3)):
        compare(name, schedule, rule, two_rates, data, 6 // count, count, prediction="spectrain")


@pytest.mark.parametrize("schedule, count", [("pipedream", 1), ("pipedream-2bw", 3)])
@pytest.mark.parametrize("name", ["1-1-1-1", "1-2-1"])
def test_without_momentum_nothing_is_predicted(name, schedule, count):
    """The weights are those without a prediction, to the bit."""
    model, data, sgd = make_model(), make_data(20, 6, last=1), partial(torch.optim.SGD, lr=0.05)
    off, on = (
        in_threads(
            make_plan(name, len(model), count, schedule, prediction=prediction),
            model,
            data,
            6 // count,
            cross_entropy,
            sgd,
        )
        for prediction in ("off", "spectrain")
    )
    assert on.losses == off.losses
    assert all(map(torch.equal, on.parameters, off.parameters))


def test_learning_rates_are_left_alone_when_asked():
    compare("1-2", "pipedream", "pipedream", OPTIMIZERS["sgd"], make_data(9, 4, 4), 4, 1, scaled=False)


SCHEDULERS = {
    "step": partial(torch.optim.lr_scheduler.StepLR, step_size=7, gamma=0.5),
    "cosine": partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=15),  # computes from the last rate
    "one cycle": partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=30),  # sets momentum
}


@pytest.mark.parametrize(
    "name, optimizer, scheduler", thinned(["1-1", "2-1", "1-2", "3"], list(OPTIMIZERS), list(SCHEDULERS))
)
def test_schedulers_count_minibatches_whatever_a_stage_makes_of_the_rate(name, optimizer, scheduler):
    data, given = make_data(20, 4, 3), {"scheduler": SCHEDULERS[scheduler]}
    compare(name, "pipedream", "pipedream", OPTIMIZERS[optimizer], data, 4, 1, warm_up=12, **given)
    compare(name, "pipedream-2bw", "2bw", OPTIMIZERS[optimizer], data, 2, 2, **given)


@pytest.mark.parametrize("vertical_sync", [False, True], ids=["stashing", "vertical sync"])
@pytest.mark.parametrize("name", ["1-1-1-1", "1-2-1", "3-1", "1-3"])
def test_late_gradients_make_small_steps_at_first(name, vertical_sync):
    rule, data = "vertical" if vertical_sync else "pipedream", make_data(20, 4, 3)
    given = {"warm_up": 12, "vertical_sync": vertical_sync}
    compare(name, "pipedream", rule, OPTIMIZERS["sgd"], data, 4, 1, **given)


@pytest.mark.parametrize("schedule, count", [("pipedream", 1), ("pipedream-2bw", 4)])
def test_recomputation_changes_nothing(schedule, count):
    rule = "2bw" if count > 1 else "pipedream"
    compare("2-1", schedule, rule, OPTIMIZERS["sgd"], make_data(9, 4, 4), 4 // count, count, recompute=True)


@pytest.mark.parametrize(
    "schedule, options, versions",
    [
        ("pipedream", {}, [3, 2, 1]),  # a stage stashes as many as there are stages to the end
        ("pipedream", {"max_in_flight": 1}, [1, 1, 1]),
        ("pipedream", {"vertical_sync": True}, [3, 3, 3]),
        ("pipedream-2bw", {}, [2, 2, 2]),
        ("pipedream", {"prediction": "spectrain"}, [4, 3, 1]),  # those in flight, and the newest
        ("pipedream", {"prediction": "spectrain", "max_in_flight": 1}, [1, 1, 1]),
        ("pipedream-2bw", {"prediction": "spectrain"}, [3, 3, 2]),
    ],
)
def test_no_more_versions_than_the_schedule_needs_are_alive(monkeypatch, schedule, options, versions):
    alive, extra_bytes = defaultdict(list), defaultdict(list)
    update = WeightVersions.update

    @contextmanager
    def noting(self):
        with update(self):
            yield
        alive[self].append(len(self.alive))
        extra_bytes[self].append(self.extra_bytes)

    def asked_for(self, number):
        weights = version(self, number)
        extra_bytes[self].append(self.extra_bytes)
        return weights

    version = WeightVersions.version
    monkeypatch.setattr(WeightVersions, "update", noting)
    monkeypatch.setattr(WeightVersions, "version", asked_for)
    model = nn.Sequential(nn.Linear(4, 20), nn.Linear(20, 30), nn.Linear(30, 3)).double()
    count = 4 if schedule == "pipedream-2bw" else 1
    plan, data = make_plan("1-1-1", 3, count, schedule, **options), make_data(12, 4, last=4)
    result = in_threads(plan, model, data, 4 // count, cross_entropy, OPTIMIZERS["sgd"])
    for layer, executor, most in zip(model, result.executors.values(), versions, strict=True):
        assert max(alive[executor.stashed.versions]) == most or plan.predicts_weights
        num_bytes = sum(parameter.nbytes for parameter in layer.parameters())
        assert max(extra_bytes[executor.stashed.versions]) == (most - 1) * num_bytes
        assert executor.stashed.versions.extra_bytes == 0, "after the drain the newest is the only one"


class Steep(torch.autograd.Function):
    """The identity, whose gradients are 2^40 times larger where a value is large."""

    @staticmethod
    def forward(ctx, values):
        ctx.factor = 2.0**40 if values.abs().max() > 50 else 1.0
        return values.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor


def weighed(outputs, targets):
    """Cross-entropy, 4096 times larger where a target has 3 added to it."""
    losses = cross_entropy(outputs, targets % 3, reduction="none")
    return (losses * torch.where(targets >= 3, 4096.0, 1.0)).mean()


@pytest.mark.parametrize(
    "name, rule",
    thinned(["1", "1-1-1-1", "3-1", "1-2-1"], ["pipedream", "vertical", "2bw"], together=1),
)
def test_each_stage_skips_what_overflows_and_all_later_scales_halve(name, rule):
    """Scales near float64's largest number, so that it overflows as float16 does."""
    model = make_model()
    model.insert(1, Call(Steep.apply))
    data = make_data(40, 4, last=4)
    for b in (9, 10, 25):  # overflows in all stages
        data[b] = data[b][0], data[b][1] + 3
    data[17][0][0, 0] = 1000.0  # overflows in the first stage only
    schedule, count = ("pipedream-2bw", 2) if rule == "2bw" else ("pipedream", 1)
    given = {"model": model, "loss": weighed, "scale": LossScale(2.0**1018, 0, True)}
    synced = {"vertical_sync": rule == "vertical"}
    result = compare(name, schedule, rule, OPTIMIZERS["adam"], data, 4 // count, count, **synced, **given)
    if rule != "vertical":
        predicting = compare(
            name, schedule, rule, OPTIMIZERS["adam"], data, 4 // count, count, prediction="xpipe", **given
        )
        assert predicting.executors[0].num_skipped >= 3
    executors = [result.executors[rank] for rank in sorted(result.executors)]
    assert executors[0].num_skipped >= 3
    if name.startswith("1-"):
        assert executors[0].num_skipped > executors[-1].num_skipped
    newest = {executor.scales.window()[-1] for executor in executors}
    assert len(newest) == 1 and 2.0**1012 <= newest.pop().value <= 2.0**1016
