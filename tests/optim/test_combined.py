"""Several optimizers of a factory act as one, and each keeps its own parameters."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

from hybridpipe.errors import UserError
from hybridpipe.optim.combined import CombinedOptimizer, kind_of, made_by, members_of
from hybridpipe.optim.fused import fused
from hybridpipe.optim.prediction import why_not_predicted
from hybridpipe.optim.trial import needs_whole, why_not_apart
from hybridpipe.optim.update import UpdateRule
from hybridpipe.planning.plan import Plan
from hybridpipe.stage.state import StageState, check_optimizer, read_optimizer, take_optimizer


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 31), nn.LayerNorm(31), nn.Linear(31, 5))


def by_kind(parameters):
    """Muon for matrices and AdamW for the rest."""
    given = list(parameters)
    matrices, others = [p for p in given if p.ndim == 2], [p for p in given if p.ndim != 2]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01)]


def by_trained(parameters):
    """Leave out frozen ones, as many do."""
    trained = [p for p in parameters if p.requires_grad]
    return [torch.optim.AdamW(trained)] if trained else []


def made(net):
    return made_by(by_kind, [*net.parameters()])


def train(net, *steppers, updates=3):
    torch.manual_seed(1)
    for _ in range(updates):
        for p in net.parameters():
            p.grad = torch.randn_like(p)
        for step in steppers:
            step()


def test_it_trains_as_its_members_would_alone():
    one, other = model(), model()
    train(one, made(one).step)
    train(other, *(fused(each)(each.step) for each in by_kind(other.parameters())))
    assert all(map(torch.equal, one.parameters(), other.parameters()))


def test_a_scheduler_changes_the_rates_of_all_members():
    optimizer = made(model())
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 0.5)
    assert [group["lr"] for each in members_of(optimizer) for group in each.param_groups] == [0.01, 0.005]


def test_a_scheduler_finds_the_options_that_all_members_have():
    both = made_by(lambda ps: [torch.optim.Adam(ps[:1]), torch.optim.AdamW(ps[1:])], [*model().parameters()])
    torch.optim.lr_scheduler.OneCycleLR(both, max_lr=0.1, total_steps=10)  # it asks for betas
    assert "betas" in both.defaults and "weight_decay" in both.defaults
    assert "momentum" not in made(model()).defaults


def test_an_optimizer_of_another_make_is_left_alone():
    """Some wrap an optimizer without being one of torch's."""

    class Wrapped:
        def __init__(self, parameters):
            self.param_groups, self.state = [{"params": [*parameters]}], {}

    assert type(made_by(Wrapped, [*model().parameters()])) is Wrapped


def test_members_that_have_a_fused_step_take_it():
    net = model()
    optimizer = made(net)
    asked = []
    _, adamw = members_of(optimizer)
    adamw.register_step_post_hook(lambda *_: asked.extend(group["fused"] for group in adamw.param_groups))
    train(net, optimizer.step, updates=1)
    assert asked == [True] and adamw.param_groups[0]["fused"] is None


def test_a_loaded_state_reaches_the_members():
    one, other = model(), model()
    first, second = made(one), made(other)
    train(one, first.step)
    other.load_state_dict(one.state_dict())
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for net, optimizer in [(one, first), (other, second)]:
        train(net, optimizer.step)
    assert all(map(torch.equal, one.parameters(), other.parameters()))


def test_a_generator_gives_its_members_too():
    net = model()
    optimizer = made_by(lambda ps: (each for each in by_kind(ps)), [*net.parameters()])
    before = [p.clone() for p in net.parameters()]
    train(net, optimizer.step, updates=1)
    assert not any(map(torch.equal, net.parameters(), before))


def test_a_copy_steps_as_well():
    net = model()
    net, optimizer = copy.deepcopy((net, made(net)))
    before = [p.clone() for p in net.parameters()]
    train(net, optimizer.step, updates=1)
    assert not any(map(torch.equal, net.parameters(), before))


def test_a_stage_in_which_all_is_frozen_needs_no_optimizer():
    net = model().requires_grad_(False)
    rule = UpdateRule(optimizer=by_trained)
    assert rule.build([*net.parameters()], Plan.data_parallel(1, 1, 1), 0, float).optimizer is None


def test_a_member_that_needs_a_closure_is_refused():
    rule = UpdateRule(optimizer=lambda ps: [torch.optim.LBFGS(ps)])
    with pytest.raises(ValueError, match="got LBFGS with step"):
        rule.try_out([*model().parameters()])


def test_what_no_factory_means_is_refused():
    given = [*model().parameters()]
    with pytest.raises(ValueError, match=r"one optimizer, got one of shape \(31, 7\) in several"):
        made_by(lambda ps: [torch.optim.SGD(ps, lr=0.1), torch.optim.AdamW(ps[:1])], given)
    with pytest.raises(ValueError, match="empty parameter list"):
        made_by(lambda _: [], given)
    with pytest.raises(ValueError, match="make each of several optimizers where it has some"):
        made_by(by_kind, given[1:2])
    with pytest.raises(ValueError, match="give the parameters to one of the optimizers in the factory"):
        made_by(by_kind, given).add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    assert not isinstance(made_by(partial(torch.optim.SGD, lr=0.1), given), CombinedOptimizer)


def test_muon_needs_whole_matrices_and_nothing_else():
    net = model()
    given, make = [*net.parameters()], partial(made_by, by_kind)
    matrices = {p for p in given if p.ndim == 2}
    before = [p.clone() for p in given]
    assert needs_whole(make, given) == matrices and kind_of(made(net)) == "Muon + AdamW"
    assert all(map(torch.equal, given, before))
    on_meta = [*copy.deepcopy(net).to("meta").parameters()]
    assert needs_whole(make, on_meta) == {p for p in on_meta if p.ndim == 2}
    dealt = {p: range(p.numel() if i else 0) if p in matrices else range(3) for i, p in enumerate(given)}
    assert why_not_apart(make, given, given, dealt) is None
    assert why_not_apart(make, given, given[:2]) is None
    cut = {p: range(p.numel() // 2) for p in given}
    assert why_not_apart(make, given, given, cut).startswith("Muon + AdamW could not be tried")


def test_only_what_all_members_can_is_predicted():
    assert why_not_predicted(made(model()), "off") is None
    assert "got Muon + AdamW: set prediction = 'off'" in why_not_predicted(made(model()), "xpipe")
    both = made_by(lambda ps: [torch.optim.Adam(ps[:1]), torch.optim.AdamW(ps[1:])], [*model().parameters()])
    assert why_not_predicted(both, "xpipe") is None


def test_state_of_another_member_is_refused():
    """A matrix that Muon trained must not go on under AdamW, which would begin anew unseen."""
    net = model()
    names, saved = {p: name for name, p in net.named_parameters()}, StageState()
    optimizer = made(net)
    train(net, optimizer.step, updates=1)
    take_optimizer(optimizer, names, saved)
    found = read_optimizer(saved, "a.pt")
    check_optimizer(optimizer, names, found, "a.pt")
    other = made_by(lambda ps: [torch.optim.AdamW(ps[:1]), torch.optim.Muon(ps[4:5])], [*net.parameters()])
    wanted = r"a.pt: 0.weight: optimizer: the checkpoint has torch\S+Muon, the training torch\S+AdamW"
    with pytest.raises(UserError, match=wanted):
        check_optimizer(other, names, found, "a.pt")
