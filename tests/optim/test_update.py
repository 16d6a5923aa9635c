"""Updates: clipping over all stages, schedulers that count minibatches, and scaled learning rates."""

import copy
import math
from functools import partial

import pytest
import torch
from torch import nn

from hybridpipe.model.held_part import HeldPart, part_of
from hybridpipe.optim.shares import ReplicaShares
from hybridpipe.optim.update import LearningRate, Update, UpdateRule
from tests.engine.helpers import assert_same, in_threads, make_plan, one_process

sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
adam = partial(torch.optim.Adam, lr=0.01)
step_lr = partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5)
cross_entropy = nn.functional.cross_entropy


def parameters(*gradients: float | None) -> list[nn.Parameter]:
    made = []
    for gradient in gradients:
        made.append(nn.Parameter(torch.ones(3, dtype=torch.float64)))
        if gradient is not None:
            made[-1].grad = torch.full((3,), gradient, dtype=torch.float64)
    return made


class Rateless(torch.optim.Optimizer):
    """An optimizer without a learning rate."""

    def __init__(self, params):
        super().__init__(params, {})

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.data -= p.grad.sign()


def test_a_step_is_fused_where_the_optimizer_leaves_that_open():
    optimizer = sgd(parameters(1.0, 2.0))
    seen = []
    optimizer.register_step_post_hook(lambda *_: seen.append(optimizer.param_groups[0]["fused"]))
    Update(optimizer).step()
    assert seen == [True] and optimizer.param_groups[0]["fused"] is None


def test_a_gradient_that_another_stage_counts_is_clipped_and_not_counted():
    own, shared = parameters(3.0, 4.0)
    seen = []

    def add_up(square: float) -> float:
        seen.append(square)
        return square + 3 * 4.0**2  # the other stage's

    Update(torch.optim.SGD([own, shared], lr=1.0), max_norm=1.0, add_up=add_up, elsewhere=[shared]).step()
    assert seen == [3 * 3.0**2]
    norm = math.sqrt(3 * 3.0**2 + 3 * 4.0**2)
    torch.testing.assert_close(1 - shared, torch.full_like(shared, 4 / norm), rtol=1e-5, atol=0)


# --- the learning rate


def test_without_a_delay_the_rate_is_the_users():
    assert LearningRate().factor(0) == 1 and LearningRate().always_one
    assert LearningRate(scale=2.0).factor(7) == 2 and not LearningRate(scale=2.0).always_one
    assert LearningRate(delay=1, warm_up=10).factor(0) == 1 and LearningRate(delay=1, warm_up=10).always_one
    assert LearningRate(delay=2, warm_up=0).always_one and not LearningRate(delay=2, warm_up=1).always_one
    assert LearningRate(delay=2).factor(0) == 1  # nor without a warm-up


@pytest.mark.parametrize("delay", [2, 3, 7])
def test_pipemare_divides_by_the_delay_and_lets_go(delay):
    rate = LearningRate(scale=2.0, delay=delay, warm_up=8)
    assert rate.factor(0) == pytest.approx(2 / delay)
    assert rate.factor(4) == pytest.approx(2 / math.sqrt(delay))
    assert rate.factor(8) == rate.factor(1000) == 2
    factors = [rate.factor(k) for k in range(9)]
    assert factors == sorted(factors) and not rate.always_one


def test_a_stage_scales_by_its_replicas_and_knows_its_delay():
    plan = make_plan("2-1-3", 6, 1, "pipedream")
    rule = UpdateRule(sgd, delay_warm_up=10)
    built = [rule.build(parameters(1.0), plan, s, float).learning_rate for s in range(3)]
    assert [rate.scale for rate in built] == [1.0, 0.5, 1.5]
    assert built[0].delay >= built[2].delay == 0
    plain = UpdateRule(sgd, scale_learning_rate=False)
    assert [plain.build(parameters(1.0), plan, s, float).learning_rate.scale for s in range(3)] == [1.0] * 3
    synchronous = make_plan("2-1-3", 6, 6)
    assert all(rule.build(parameters(1.0), synchronous, s, float).learning_rate.always_one for s in range(3))


# --- clipping


@pytest.mark.parametrize("max_norm", [0.5, 3.0, 100.0])
@pytest.mark.parametrize("value", [1.0, math.inf, math.nan])
def test_clipping_is_that_of_torch(max_norm, value):
    mine, whole = parameters(value, -2.0, None, 0.5), parameters(value, -2.0, None, 0.5)
    optimizer = torch.optim.SGD(mine, lr=1.0)
    nn.utils.clip_grad_norm_(whole, max_norm)
    expected = torch.optim.SGD(whole, lr=1.0)
    Update(optimizer, max_norm=max_norm).step()
    expected.step()
    torch.testing.assert_close(mine, whole, rtol=0, atol=1e-12, equal_nan=True)
    assert all(p.grad is None for p in mine)


def test_a_norm_at_the_limit_is_clipped_as_torch_does():
    mine, whole = parameters(1.0), parameters(1.0)
    nn.utils.clip_grad_norm_(whole, math.sqrt(3))  # torch divides by the norm plus 1e-6
    torch.optim.SGD(whole, lr=1.0).step()
    Update(torch.optim.SGD(mine, lr=1.0), max_norm=math.sqrt(3)).step()
    torch.testing.assert_close(mine, whole, rtol=0, atol=1e-15)


def test_the_norm_is_over_all_stages():
    mine, whole = parameters(1.0), parameters(1.0, 5.0)
    Update(torch.optim.SGD(mine, lr=1.0), max_norm=2.0, add_up=lambda number: number + 75.0).step()
    nn.utils.clip_grad_norm_(whole, 2.0)
    torch.testing.assert_close(mine[0], 1 - whole[0].grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("optimizer", [None, "no gradient"])
def test_a_stage_that_has_no_gradients_adds_nothing_to_the_norm(optimizer):
    told = []
    made = None if optimizer is None else sgd(parameters(None))
    Update(made, step_lr, max_norm=1.0, add_up=lambda number: told.append(number) or 9.0).step()
    assert told == [0.0]


def test_all_parameter_groups_are_clipped_and_scaled():
    a, b = parameters(3.0, 4.0)
    optimizer = torch.optim.SGD([{"params": [a]}, {"params": [b], "lr": 0.5}, {"params": []}], lr=1.0)
    Update(optimizer, learning_rate=LearningRate(scale=2.0), max_norm=1.0).step()
    norm = math.sqrt(3 * 9 + 3 * 16) + 1e-6
    torch.testing.assert_close(a, torch.full_like(a, 1 - 2 * 3 / norm), rtol=0, atol=1e-12)
    torch.testing.assert_close(b, torch.full_like(b, 1 - 4 / norm), rtol=0, atol=1e-12)
    assert [group["lr"] for group in optimizer.param_groups] == [1.0, 0.5, 1.0]


def test_a_factor_reaches_every_gradient_that_there_is():
    a, b, unused, alone = parameters(3.0, 4.0, None, 5.0)
    Update(torch.optim.SGD([a, b, unused], lr=1.0), parameters=[a, b, unused, alone]).scale(0.5)
    assert [p.grad[0].item() for p in (a, b, alone)] == [1.5, 2.0, 2.5] and unused.grad is None


# --- the learning rate that schedulers see


def test_the_scheduler_counts_minibatches_and_sees_the_users_rate():
    optimizer = sgd(parameters(1.0))
    update = Update(optimizer, step_lr, LearningRate(scale=3.0, delay=4, warm_up=100))
    seen = []
    for count in (1, 1, 2, 1):  # an update of a stage with replicas covers a round of several minibatches
        update.step(count)
        seen.append(optimizer.param_groups[0]["lr"])
    assert seen == [0.1, 0.05, 0.025, 0.025]
    assert update.scheduler.last_epoch == update.num_minibatches == 5


@pytest.mark.parametrize("factory", [sgd, adam])
def test_the_optimizers_state_is_free_of_the_factor(factory):
    plain, scaled = parameters(1.0, 2.0), parameters(1.0, 2.0)
    updates = [Update(factory(plain)), Update(factory(scaled), learning_rate=LearningRate(scale=0.25))]
    for value in (1.0, -3.0):
        for p in (*plain, *scaled):
            p.grad = torch.full_like(p, value)
        for update in updates:
            update.step()
    state, other = (update.optimizer.state_dict() for update in updates)
    assert state["param_groups"] == other["param_groups"]
    torch.testing.assert_close(state["state"], other["state"], rtol=0, atol=0)
    moved = [(1 - p).detach() for p in (*plain, *scaled)]
    torch.testing.assert_close(moved[2:], [0.25 * each for each in moved[:2]], rtol=0, atol=1e-12)


def test_an_error_in_the_step_leaves_the_rate_as_it_was():
    optimizer = sgd(parameters(1.0))

    def fail():
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.2)
        raise RuntimeError("injected")

    update = Update(optimizer, learning_rate=LearningRate(scale=2.0))
    optimizer.step = fail
    with pytest.raises(RuntimeError, match="injected"):
        update.step()
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_a_rate_that_is_a_tensor_stays_the_same_tensor():
    rate = torch.tensor(0.5, dtype=torch.float64)
    (mine,) = parameters(1.0)
    optimizer = torch.optim.SGD([mine], lr=rate)
    update = Update(optimizer, step_lr, LearningRate(scale=2.0))
    given = optimizer.param_groups[0]["lr"]
    update.step()
    torch.testing.assert_close(mine, torch.zeros_like(mine))
    assert optimizer.param_groups[0]["lr"] is given and given == 0.5
    mine.grad = torch.ones_like(mine)
    update.step()
    assert optimizer.param_groups[0]["lr"] is given and given == 0.25  # the scheduler has set it


# --- refused optimizers and options


def test_optimizers_without_a_rate_work_where_nothing_changes_it():
    (mine,) = parameters(3.0)
    Update(Rateless([mine])).step()
    assert mine.tolist() == [0.0] * 3
    with pytest.raises(ValueError, match="'lr' in each parameter group, got Rateless: scale_learning_rate"):
        Update(Rateless(parameters(1.0)), learning_rate=LearningRate(scale=2.0))


def test_optimizers_that_want_a_closure_are_refused():
    rule = UpdateRule(torch.optim.LBFGS)
    with pytest.raises(ValueError, match=r"optimizer must have a step\(\) .* got LBFGS with step\(closure\)"):
        rule.try_out(parameters(1.0))
    with pytest.raises(ValueError, match="got LBFGS"):
        rule.why_not_apart(nn.ParameterList(parameters(1.0, 2.0)), parameters(1.0), None, has_all=False)


def test_schedulers_that_want_a_metric_are_refused():
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
    with pytest.raises(ValueError, match=r"lr_scheduler .* got ReduceLROnPlateau with step\(metrics\)"):
        Update(sgd(parameters(1.0)), plateau)
    Update(None, plateau)  # without an optimizer no scheduler is made


@pytest.mark.parametrize(
    "schedule, options, told",
    [
        ("1f1b", {"clip_grad_norm": 0.0}, "clip_grad_norm must be a finite number > 0, got 0.0"),
        ("1f1b", {"clip_grad_norm": -1}, "clip_grad_norm must be a finite number > 0, got -1"),
        ("1f1b", {"delay_warm_up": -1}, "delay_warm_up must be an integer >= 0, got -1"),
        ("1f1b", {"delay_warm_up": 5}, "delay_warm_up must be 0 under 1f1b"),
        ("zero-bubble", {"delay_warm_up": 5}, "delay_warm_up must be 0 under zero-bubble"),
        ("pipedream", {"clip_grad_norm": 1.0}, "clip_grad_norm must not be given under pipedream"),
        ("pipedream-2bw", {"clip_grad_norm": 1.0}, "clip_grad_norm must not be given under pipedream-2bw"),
        ("pipedream-2bw", {"delay_warm_up": 5}, "delay_warm_up must be 0 under pipedream-2bw"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(schedule, options, told):
    plan = make_plan("1-1", 2, 1 if schedule == "pipedream" else 4, schedule)
    with pytest.raises(ValueError, match=told) as caught:
        UpdateRule(sgd, **options).check(plan)
    assert "\n" not in str(caught.value)


def test_what_makes_sense_is_not():
    UpdateRule(sgd, clip_grad_norm=1.0).check(make_plan("1-1", 2, 4))
    UpdateRule(sgd, delay_warm_up=5).check(make_plan("1-1", 2, 1, "pipedream"))


# --- in a pipeline


class Spare(nn.Module):
    """A layer with a parameter that it does not use."""

    def __init__(self, size: int):
        super().__init__()
        self.used, self.unused = nn.Linear(size, size), nn.Linear(size, size)

    def forward(self, x):
        return self.used(x)


def make_model(frozen: int | None = None) -> nn.Sequential:
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), Spare(5), nn.Linear(5, 3)
    ).double()
    if frozen is not None:
        model[frozen].requires_grad_(False)
    return model


def make_data(count: int):
    torch.manual_seed(2)
    sizes = [8] * (count - 1) + [5]
    return [(torch.randn(n, 4, dtype=torch.float64), torch.randint(0, 3, (n,))) for n in sizes]


SYNCHRONOUS = [
    *(
        (name, schedule, 1)
        for name in ("1-1", "2-1", "1-2", "3")
        for schedule in ("gpipe", "1f1b", "zero-bubble")
    ),
    ("1-1", "interleaved-1f1b", 2),
    ("2-2", "interleaved-1f1b", 3),
    ("1-1", "zb-v", 2),
    ("2-2", "v-half", 2),
]
SCHEDULERS = {
    "step": step_lr,
    "cosine": partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=5),
    "one cycle": partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=12),
}


def compare(name, schedule, chunks, model, optimizer=sgd, accumulate=1, within=1e-10, **options):
    plan, data = make_plan(name, len(model), 4, schedule, chunks=chunks), make_data(9)
    rule = UpdateRule(optimizer, **options)
    rule.check(plan)
    expected = one_process(model, data, cross_entropy, optimizer, accumulate=accumulate, **options)
    result = in_threads(plan, model, data, 2, cross_entropy, rule=rule, accumulate=accumulate)
    assert_same(result, expected, within)
    return expected


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("factory", [sgd, adam], ids=["sgd", "adam"])
@pytest.mark.parametrize("name, schedule, chunks", SYNCHRONOUS)
def test_a_pipeline_clips_and_schedules_as_one_process(name, schedule, chunks, factory, scheduler):
    options = {"lr_scheduler": SCHEDULERS[scheduler], "clip_grad_norm": 0.25}
    expected = compare(name, schedule, chunks, make_model(), factory, **options)
    norms = [
        math.sqrt(sum(float(g.square().sum()) for g in each if g is not None)) for each in expected.gradients
    ]
    assert max(norms) > 0.25, "something was clipped"


@pytest.mark.parametrize("name, schedule, chunks", SYNCHRONOUS)
def test_gradients_of_three_minibatches_add_up(name, schedule, chunks):
    compare(name, schedule, chunks, make_model(), accumulate=3)
    compare(name, schedule, chunks, make_model(), accumulate=3, lr_scheduler=step_lr, clip_grad_norm=0.5)


@pytest.mark.parametrize("frozen", [0, 5])
@pytest.mark.parametrize("name", ["1-1-1", "2-1-1", "1-1-2"])
def test_a_frozen_stage_takes_part(name, frozen):
    model = make_model(frozen)
    compare(name, "1f1b", 1, model, lr_scheduler=step_lr, clip_grad_norm=0.25)


def test_a_stage_without_parameters_takes_part():
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh()).double()
    compare("1-1", "zero-bubble", 1, model, lr_scheduler=step_lr, clip_grad_norm=0.1)
    compare("1-2", "1f1b", 1, copy.deepcopy(model), lr_scheduler=step_lr, clip_grad_norm=0.1)


def test_an_unknown_compression_is_refused_before_anything_is_measured():
    with pytest.raises(ValueError, match="compression must be one of none, fp16, got 'int8'"):
        UpdateRule(partial(torch.optim.SGD, lr=0.1), compression="int8")


def test_gradients_in_bfloat16_are_refused_with_what_to_do_instead():
    told = r"must not be 'bf16': Horovod adds no bfloat16.*use 'fp16', or 'none'"
    with pytest.raises(ValueError, match=told):
        UpdateRule(partial(torch.optim.SGD, lr=0.1), compression="bf16")


def test_a_stage_of_frozen_parameters_may_have_no_optimizer():
    """As where the user's optimizer takes only what is trained: then it has nothing to take."""

    def trained_only(parameters):
        return torch.optim.SGD([p for p in parameters if p.requires_grad], lr=0.1)

    rule, plan = UpdateRule(trained_only), make_plan("1-1", 2, 2)
    frozen = [nn.Parameter(torch.ones(1), requires_grad=False)]
    update = rule.build(frozen, plan, 0, float)
    assert update.optimizer is None
    update.step()
    assert update.num_minibatches == 1
    with pytest.raises(ValueError, match="empty parameter list"):
        UpdateRule(lambda parameters: torch.optim.SGD([], lr=0.1)).build(parameters(1.0), plan, 0, float)
    with pytest.raises(ValueError, match="Invalid learning rate"):
        UpdateRule(lambda parameters: torch.optim.SGD(parameters, lr=-1.0)).build(frozen, plan, 0, float)


@pytest.mark.filterwarnings("error")
def test_a_new_scheduler_catches_up_without_a_step_of_the_optimizer():
    (weight,) = parameters(1.0)
    update = Update(sgd([weight]), step_lr)
    update.catch_up(5)
    assert update.num_minibatches == 5
    assert update.optimizer.param_groups[0]["lr"] == 0.1 * 0.5**2
    assert weight.eq(1).all() and weight.grad is None


@pytest.mark.filterwarnings("error")
def test_a_first_update_that_is_skipped_counts_for_the_scheduler_without_a_warning():
    parameter = torch.ones(1, requires_grad=True)
    update = Update(torch.optim.SGD([parameter], lr=1.0), step_lr)
    for _ in range(2):
        parameter.grad = torch.ones(1)
        update.skip()
    assert parameter.item() == 1 and parameter.grad is None
    assert update.optimizer.param_groups[0]["lr"] == 0.5


def trained_only(given):
    return torch.optim.SGD([p for p in given if p.requires_grad], lr=0.1)


def test_replicas_of_a_frozen_stage_have_no_update_to_shard():
    frozen = [p.requires_grad_(False) for p in parameters(None, None)]
    shares, rule = ReplicaShares(frozen, 0, (0, 1), None), UpdateRule(trained_only)
    assert rule.why_not_apart(nn.ParameterList(frozen), frozen, shares, has_all=True) is None
    assert rule.build(frozen, make_plan("2", 4, 2), 0, float, (), shares).optimizer is None


def test_parts_of_experts_need_an_optimizer_that_updates_each_element_by_itself():
    """Adafactor's scale is of a whole parameter, of which a replica has the first half."""
    whole = nn.Parameter(torch.ones(4, 3, 2, dtype=torch.float64))
    part = part_of(whole, whole.detach(), HeldPart(whole.shape, "replica", 0, 2))
    told = "split experts need an optimizer that updates each element by itself: Adafactor updates a part"
    model = nn.ParameterList([part])
    assert UpdateRule(torch.optim.Adam).why_not_apart(model, [part], None, has_all=True) is None
    why = UpdateRule(torch.optim.Adafactor).why_not_apart(model, [part], None, has_all=True)
    assert why.startswith(told) and "set experts = false" in why
    assert UpdateRule(torch.optim.Adafactor).why_not_apart(model, [whole], None, has_all=True) is None


def test_scaling_and_clipping_reach_the_parts():
    """Each replica counts its own elements, and a whole parameter on one of them only."""
    given = parameters(None, None)
    whole = given[1]
    shares = ReplicaShares(given, 0, (0, 1), None, sparse={whole})
    told = []
    update = UpdateRule(sgd, clip_grad_norm=1.0).build(
        given, make_plan("2", 4, 2), 0, lambda number: told.append(number) or number, [whole], shares
    )
    part = shares.parts[given[0]]
    given[0].grad = torch.full((3,), 4.0, dtype=torch.float64)
    shares.take()
    whole.grad = torch.full((3,), 8.0, dtype=torch.float64)
    update.scale(0.5)
    update.step()
    assert told == [pytest.approx(3 * 2.0**2)]
    assert torch.allclose(part, 1 - 0.1 * torch.full_like(part, 2 / math.sqrt(12)), rtol=1e-5)
    assert part.grad is whole.grad is None
