"""An optimizer that looks beyond what it updates is found out before it trains parts of a model."""

import random
import re
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from hybridpipe.optim import trial
from hybridpipe.optim.trial import ELEMENTWISE, TENSORWISE, why_not_apart
from hybridpipe.optim.update import UpdateRule


class Lamb(torch.optim.Optimizer):
    """Scales each update by norms of the whole parameter (You et al., ICLR 2020), without moments."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad * (group["lr"] * p.norm() / p.grad.norm()))


class MySGD(torch.optim.SGD):
    """A subclass whose step is still the elementwise one."""


class Mixed(torch.optim.SGD):
    """Centralises the gradients of some groups."""

    def step(self):
        for group in self.param_groups:
            for p in group["params"] if group.get("centralised") else ():
                p.grad = p.grad - p.grad.mean()
        super().step()


class Blocks(torch.optim.SGD):
    """Divides gradients by the largest of each 2,048 elements, as quantised states do."""

    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                for block in p.grad.view(-1).split(2048):
                    block.div_(block.abs().max())
        super().step()


class Clipped(torch.optim.SGD):
    """Clips by the norm of all that it updates, of which a replica has a part."""

    def step(self):
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 1.0)
        super().step()


class OnlyKernels(torch.optim.SGD):
    """Centralises gradients of convolutions only."""

    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.ndim > 3:
                    p.grad -= p.grad.mean()
        super().step()


class Noisy(torch.optim.SGD):
    """Adds noise."""

    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = p.grad + torch.randn_like(p.grad)
        super().step()


class OnlyMatrices(torch.optim.SGD):
    """Refuses what is no matrix."""

    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = p.grad.mT.mT
        super().step()


class Idle(torch.optim.SGD):
    """Looks at parameters of its own list, as LBFGS does."""

    def step(self):
        """Do nothing."""


class Counted(torch.optim.SGD):
    """Does as SGD until a step of a parameter, then as LAMB."""

    first = 4

    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["count"] = count = self.state[p].get("count", 0) + 1
                    if count >= self.first and p.norm() > 0:
                        p.grad = p.grad * (p.norm() / p.grad.norm())
        super().step()


class Later(Counted):
    first = 15


class OfSmall(torch.optim.SGD):
    """Divides small gradients by their norm, as an optimizer does that guards against vanishing ones."""

    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.grad.norm() < 1e-4:
                    p.grad = p.grad * (1e-4 / p.grad.norm())
        super().step()


class OfLarge(torch.optim.SGD):
    """Clips each parameter's gradient by its norm."""

    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    nn.utils.clip_grad_norm_([p], 100.0)
        super().step()


class OnlyThree(torch.optim.SGD):
    """Centralises gradients of three dimensions only, such as those of Conv1d."""

    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.ndim == 3:
                    p.grad = p.grad - p.grad.mean(dim=(1, 2), keepdim=True)
        super().step()


class FlatState(torch.optim.SGD):
    """Keeps momentum as a row, which cannot be told from a number for the whole parameter."""

    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    kept = self.state[p].setdefault("average", torch.zeros(2 * p.numel()))
                    kept[: p.numel()].lerp_(p.grad.reshape(-1), 0.1)
                    p.grad = kept[: p.numel()].view(p.shape).clone()
        super().step()


class OwnList(torch.optim.SGD):
    """Clips by the norm of the parameters that it was made with, whatever its groups hold."""

    def __init__(self, params, lr=0.01):
        self.all = list(params)
        super().__init__(self.all, lr=lr)

    def step(self):
        nn.utils.clip_grad_norm_(self.all, 1.0)
        super().step()


class Largest(torch.optim.SGD):
    """Divides all gradients by the largest norm of one."""

    def step(self):
        given = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        largest = max(p.grad.norm() for p in given)
        for p in given:
            p.grad = p.grad / largest
        super().step()


class StepSize(torch.optim.SGD):
    """Divides the rate by a global sum that is kept in a group, as learning-rate-free optimizers do."""

    def step(self):
        group = self.param_groups[0]
        given = [p for each in self.param_groups for p in each["params"] if p.grad is not None]
        group["sum"] = group.get("sum", 0.0) + float(sum(p.grad.square().sum() for p in given))
        rates = [each["lr"] for each in self.param_groups]
        for each in self.param_groups:
            each["lr"] = each["lr"] / group["sum"] ** 0.5
        super().step()
        for each, rate in zip(self.param_groups, rates):
            each["lr"] = rate


class Both(torch.optim.SGD):
    """Is Python's and NumPy's random numbers' customer, too."""

    def step(self):
        random.random(), np.random.rand(), torch.rand(1)
        super().step()


def hooked(given):
    """Clip in a hook, by the list that the factory was called with."""
    given = list(given)
    optimizer = torch.optim.Adam(given, lr=0.01)
    optimizer.register_step_pre_hook(lambda *_: (nn.utils.clip_grad_norm_(given, 1.0), None)[1])
    return optimizer


def averaging(given):
    """Let a hook behind the step pull all weights to their mean."""

    def pull(optimizer, *_):
        given = [p.detach() for group in optimizer.param_groups for p in group["params"]]
        mean = torch.cat([p.view(-1) for p in given]).mean()
        for p in given:
            p.lerp_(mean, 0.1)

    optimizer = torch.optim.SGD(given, lr=0.01)
    optimizer.register_step_post_hook(pull)
    return optimizer


def without_last(given):
    """Leave out the last one, as a mistake in a slice does."""
    return torch.optim.SGD([{"params": list(given)[:-1]}], lr=0.1)


def slower_if_many(given):
    """Give a group of many parameters an option that no other has."""
    given = list(given)
    return torch.optim.SGD([{"params": given, **({"extra": 0.5} if len(given) > 4 else {})}], lr=0.1)


def halving(given):
    """Begin with smaller weights."""
    given = list(given)
    with torch.no_grad():
        for p in given:
            p.mul_(0.5)
    return torch.optim.SGD(given, lr=0.1)


def layerwise(given):
    """Give each parameter a rate by its place in the model."""
    return torch.optim.SGD([{"params": [p], "lr": 0.1 * 0.9**i} for i, p in enumerate(given)])


def shared_rate(given):
    """Divide a rate by the number of parameters."""
    given = list(given)
    return torch.optim.Adam(given, lr=torch.tensor(0.1 / len(given)))


def by_dimensions(given, kind=Lamb):
    """Two groups with options and names of their own."""
    matrices = {"params": [p for p in given if p.ndim > 1], "lr": 0.1, "name": "matrices"}
    rest = {"params": [p for p in given if p.ndim < 2], "lr": 0.2, "name": "rest"}
    return kind([matrices, rest])


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(3)
    shapes = (3, 4), (4,), (5, 3, 2), (2, 3, 2, 2), (6, 4), (), (6,)
    return [nn.Parameter(torch.randn(shape)) for shape in shapes]


def halves(given) -> dict:
    return {p: range(p.numel() // 2, p.numel()) for p in given}


def in_parts(factory, sharded=None) -> str | None:
    given = parameters()
    return why_not_apart(factory, given, given, halves([given[i] for i in sharded or range(len(given))]))


def in_stages(factory) -> set[str | None]:
    given = parameters()
    return {why_not_apart(factory, given, own) for own in (given[:3], given[3:])}


BY_PART = "updates a part of a parameter otherwise than the whole"
BY_STAGE = "updates a stage's parameters otherwise than among the whole model's"
LOOK_AT_A_PARAMETER = [Lamb, Blocks, OnlyKernels, Counted, Later, OfSmall, OfLarge, OnlyThree, FlatState]
LOOK_AT_ALL = [Clipped, OwnList, Largest, StepSize]


@pytest.mark.parametrize("kind", ELEMENTWISE)
def test_torchs_own_say_what_a_trial_says(monkeypatch, kind):
    """The list is no guess: each of them passes the trial that others must pass."""
    monkeypatch.setattr(trial, "ELEMENTWISE", ())
    monkeypatch.setattr(trial, "TENSORWISE", ())
    for factory in (partial(kind, lr=0.01), partial(by_dimensions, kind=kind)):
        assert in_parts(factory) is None
        assert in_stages(factory) == {None}


@pytest.mark.parametrize("kind", [each for each in TENSORWISE if each not in ELEMENTWISE])
def test_torchs_own_that_look_at_a_parameter_say_what_a_trial_says(monkeypatch, kind):
    monkeypatch.setattr(trial, "TENSORWISE", ())
    given = [nn.Parameter(torch.randn(size, 4)) for size in (3, 5, 7, 2)]
    sparse = given if kind is torch.optim.SparseAdam else ()
    for own in (given[:1], given[1:]):
        assert why_not_apart(partial(kind, lr=0.01), given, own, sparse=sparse) is None


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {"amsgrad": True}])
def test_options_of_torchs_own_change_nothing(options):
    class Mine(torch.optim.Adam):
        pass

    assert in_parts(partial(Mine, **options)) is None
    assert in_stages(partial(Mine, **options)) == {None}


@pytest.mark.parametrize("factory", [MySGD, partial(MySGD, momentum=0.9, weight_decay=0.1)])
def test_a_subclass_that_looks_at_no_other_element_is_accepted(factory):
    assert in_parts(factory) is None
    assert in_stages(factory) == {None}


@pytest.mark.parametrize("factory", [*LOOK_AT_A_PARAMETER, torch.optim.Adafactor])
def test_what_looks_at_a_parameter_trains_stages_and_no_parts(factory):
    assert in_parts(factory).startswith(factory.__name__) and BY_PART in in_parts(factory)
    assert in_stages(factory) == {None}


@pytest.mark.parametrize("factory", LOOK_AT_ALL)
def test_what_looks_at_all_parameters_trains_neither(factory):
    assert BY_PART in in_parts(factory)
    (why,) = in_stages(factory) - {None}
    assert BY_STAGE in why


@pytest.mark.parametrize("factory", [layerwise, shared_rate])
def test_options_that_depend_on_the_other_parameters_are_found_out(factory):
    """Torch's own optimizers, too, are made by a function of the user's."""
    (why,) = in_stages(factory) - {None}
    assert why.endswith("gives a stage's parameters another lr than among the whole model's")
    assert in_parts(factory) is None


def test_groups_keep_their_options():
    assert in_stages(by_dimensions) == {None}


@pytest.mark.parametrize("factory, kind", [(hooked, "Adam"), (averaging, "SGD")])
def test_a_hook_is_told_by_its_name(factory, kind):
    assert in_parts(factory).startswith(f"{kind} has the step hook {factory.__name__}.<locals>.")
    assert in_stages(factory) == {in_parts(factory)}


@pytest.mark.parametrize("when", ["pre", "post"])
@pytest.mark.parametrize("of_all", [True, False])
def test_what_a_hook_changes_is_the_users(when, of_all):
    """An average of the real model's weights had 240 updates before the training began."""
    from torch.optim import optimizer as of_any

    class Counting:
        calls = 0

        def __call__(self, *_):
            self.calls += 1

    count = Counting()

    def factory(given):
        optimizer = torch.optim.SGD(given, lr=0.1)
        if not of_all:
            getattr(optimizer, f"register_step_{when}_hook")(count)
        return optimizer

    handle = getattr(of_any, f"register_optimizer_step_{when}_hook")(count) if of_all else None
    try:
        for why in {in_parts(factory), *in_stages(factory)}:
            assert "SGD has the step hook" in why and "Counting, which" in why
    finally:
        _ = handle and handle.remove()
    assert count.calls == 0
    assert in_parts(torch.optim.SGD) is None


def test_a_parameter_that_the_factory_leaves_out_by_its_place_is_found_out():
    """A known class passed, whose last parameter was not compared: each stage's last one stayed as it was."""
    told = "SGD takes others of a stage's parameters than among the whole model's"
    assert in_stages(without_last) == {None, told}
    given = parameters()[:2]
    assert why_not_apart(without_last, given, given[:1]) == told  # of which it has none


def test_an_option_that_a_parameter_has_among_all_only_is_found_out():
    (why,) = in_stages(slower_if_many)
    assert why == "SGD gives a stage's parameters another extra than among the whole model's"


def test_a_factory_that_writes_to_its_parameters_is_tried_on_small_ones():
    """It wrote to the weights twice, or failed with torch's words about memory that is not there."""
    given = parameters()
    before = [p.detach().clone() for p in given]
    for own in (given[:3], given[3:]):
        assert why_not_apart(halving, given, own) is None
    assert why_not_apart(halving, given, given, halves(given)) is None
    assert all(map(torch.equal, given, before))
    hollow = [nn.Parameter(torch.empty(7, 5, device="meta"))]
    assert why_not_apart(halving, hollow, hollow, halves(hollow)) is None


@pytest.mark.parametrize("held", [0, 1])
def test_a_factory_that_writes_to_a_large_parameter_is_told(held):
    given = [nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(70, 70))]
    why = why_not_apart(halving, given, [given[held]])
    told = "could not be tried: its factory writes to a parameter of more than 4,096 elements"
    assert why == f"{('SGD', 'the optimizer')[held]} {told}"
    assert all(p.eq(1).all() for p in given)


def test_a_factory_that_fails_raises_as_without_a_trial():
    given = parameters()
    with pytest.raises(ValueError, match="Invalid learning rate: -1"):
        why_not_apart(partial(MySGD, lr=-1.0), given, given[:3])

    def by_spread(given):
        return torch.optim.SGD(given, lr=1 / float(max(p.detach().std() for p in given if p.numel() > 1)))

    told = r"the optimizer could not be tried: ZeroDivisionError: (float )?division by zero"  # Python 3.14
    assert re.fullmatch(told, why_not_apart(by_spread, given, given[:3]))


@pytest.mark.parametrize("small", [(6,), (5, 3, 2)])
def test_a_small_parameter_is_tried_beside_many_large_ones(small):
    """Large ones used up the room."""

    class OfOneShape(torch.optim.SGD):
        def step(self):
            given = [p for group in self.param_groups for p in group["params"]]
            if any(p.shape == small for p in given):
                nn.utils.clip_grad_norm_(given, 1.0)
            super().step()

    given = [nn.Parameter(torch.empty(512 * 2**i, 512)) for i in range(5)]
    given += [nn.Parameter(torch.empty(small)), nn.Parameter(torch.empty(4))]
    assert BY_STAGE in why_not_apart(OfOneShape, given, given[:-1])
    assert BY_PART in why_not_apart(OfOneShape, given, given, halves(given))


def test_options_of_all_parameters_are_compared():
    """Of many that are alike few take steps."""

    def by_place(given):
        given = list(given)
        return torch.optim.SGD([{"params": given[:700]}, {"params": given[700:], "lr": 0.2}], lr=0.1)

    given = [nn.Parameter(torch.empty(64, 64)) for _ in range(1500)]
    assert "another lr" in why_not_apart(by_place, given, given[600:1400])
    assert all(p.shape == (64, 64) for p in given)


def test_a_rate_that_a_scheduler_sets_later_hides_nothing():
    assert "otherwise than the whole" in in_parts(partial(Lamb, lr=0.0))
    assert in_parts(partial(MySGD, lr=0.0)) is None


def test_what_cannot_run_on_a_part_is_told_with_its_error():
    given = parameters()[:1]
    told = "OnlyMatrices could not be tried on a part of a parameter: RuntimeError"
    assert why_not_apart(OnlyMatrices, given, given, halves(given)).startswith(told)
    assert "could not be tried" in why_not_apart(torch.optim.Muon, given, given, halves(given))
    assert in_parts(OnlyMatrices).startswith("OnlyMatrices could not be tried: RuntimeError")


def test_an_optimizer_that_changes_nothing_has_not_been_tried():
    assert in_parts(Idle) == "Idle could not be tried: it has changed nothing"
    assert in_parts(partial(Idle, lr=0.0)) is None
    assert "it has changed nothing" in next(iter(in_stages(Idle)))


def test_each_group_is_tried_whose_parameters_are_sharded():
    def factory(given):
        matrix, *rest = given
        return Mixed([{"params": rest}, {"params": [matrix], "centralised": True}], lr=0.1)

    assert BY_PART in in_parts(factory)
    assert in_parts(factory, sharded=[1]) is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64])
def test_other_types(dtype):
    given = [nn.Parameter(torch.randn(9, 5).to(dtype)), nn.Parameter(torch.randn(9).to(dtype))]
    assert why_not_apart(MySGD, given, given, halves(given)) is None
    assert why_not_apart(MySGD, given, given[:1]) is None
    assert BY_PART in why_not_apart(Lamb, given, given, halves(given))
    assert BY_STAGE in why_not_apart(Clipped, given, given[:1])
    assert all(p.dtype == dtype for p in given)


@pytest.mark.parametrize("factory", [Noisy, Both, Clipped])
def test_a_trial_leaves_parameters_and_generators_as_they_were(factory):
    given = parameters()
    given[0].grad = torch.ones(3, 4)
    before, places = [p.detach().clone() for p in given], [p.data_ptr() for p in given]
    gradients = [p.grad for p in given]
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    why_not_apart(factory, given, given, halves(given))
    why_not_apart(factory, given, given[3:])
    assert all(map(torch.equal, given, before)) and places == [p.data_ptr() for p in given]
    assert all(p.grad is gradient for p, gradient in zip(given, gradients))
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    assert all(map(np.array_equal, np.random.get_state()[1:], states[2][1:]))


def test_random_numbers_of_a_step_are_not_those_of_the_whole():
    assert BY_STAGE in next(iter(in_stages(Noisy) - {None}))


def test_a_large_model_is_tried_on_less():
    """Tensors are shorter, and of those that are alike some are left out: time and memory have a bound."""
    seen = []

    class Seen(Clipped):
        def step(self):
            seen.append([tuple(p.shape) for group in self.param_groups for p in group["params"]])
            super().step()

    given = [nn.Parameter(torch.empty(shape)) for shape in [(4096, 3, 1024), *[(64, 64)] * 600]]
    assert BY_STAGE in why_not_apart(Seen, given, given[:300])
    assert (256, 3, 256) in seen[0] and max(map(len, seen)) < 600
    assert given[0].shape == (4096, 3, 1024)


def test_what_is_cut_is_tried_first():
    """Of many parameters few are cut, as a bucket of them ends in one."""
    given = [nn.Parameter(torch.empty(64, 64)) for _ in range(600)]
    ranges = {p: range(0 if i < 500 else 64**2) for i, p in enumerate(given)} | {given[500]: range(9)}
    assert BY_PART in why_not_apart(Lamb, given, given, ranges)
    assert why_not_apart(Lamb, given, given, ranges | {given[500]: range(0)}) is None


def test_tensors_on_the_meta_device():
    """Those of other stages, where each rank makes only its own."""
    own, other = parameters()[:2], [nn.Parameter(torch.empty(7, 5, device="meta"))]
    assert why_not_apart(Lamb, [*own, *other], own) is None
    assert BY_STAGE in why_not_apart(OwnList, [*own, *other], own)
    assert why_not_apart(MySGD, other, other, halves(other)) is None
    assert BY_PART in why_not_apart(Lamb, other, other, halves(other))
    assert other[0].is_meta


def test_frozen_parameters_that_the_factory_leaves_out():
    def trained(given):
        return MySGD([p for p in given if p.requires_grad], lr=0.1)

    given = parameters()
    for p in given[:3]:
        p.requires_grad = False
    assert why_not_apart(trained, given, given[3:]) is None
    rule = UpdateRule(trained)
    assert rule.why_not_apart(nn.ParameterList(given), given[:3], None, has_all=False) is None


def test_the_user_may_allow_what_looks_at_a_stage():
    given = parameters()
    model = nn.ParameterList(given)
    why = UpdateRule(Clipped).why_not_apart(model, given[:3], None, has_all=False)
    assert why == (
        f"several stages need an optimizer that updates each parameter by itself: Clipped {BY_STAGE}; clip "
        "by clip_grad_norm, take plan='dp', or allow it by optimizer_per_stage=True"
    )
    allowing = UpdateRule(Clipped, optimizer_per_stage=True)
    assert allowing.why_not_apart(model, given[:3], None, has_all=False) is None
    assert UpdateRule(Clipped).why_not_apart(model, given, None, has_all=True) is None
    assert BY_PART in allowing.why_not_halved(model)  # nothing is sharded by choice
