"""Which modules of a model hold experts, which stages split them, and what a rank keeps of them."""

import copy

import pytest
import torch
from torch import nn

from hybridpipe.model.deferred_init.deferred import build
from hybridpipe.model.experts import MODULE, PARAMETER, Experts, experts_of, hold_parts, split_by
from hybridpipe.model.held_part import HeldPart, held_part, whole_forms
from hybridpipe.planning.plan import Plan, StageSpec

COUNT, WIDTH = 4, 3


class Mixed(nn.Module):
    """Four experts in 3-D weights; as many are chosen for a token."""

    def __init__(self, count: int = COUNT, scale: nn.Parameter | None = None):
        super().__init__()
        self.num_experts, self.num_experts_per_tok, self.hidden_size = count, count, count
        self.up = nn.Parameter(torch.randn(count, WIDTH, 2 * WIDTH))
        self.bias = nn.Parameter(torch.randn(count, WIDTH), requires_grad=False)
        self.inner = nn.Module()
        self.inner.scale = nn.Parameter(torch.ones(count)) if scale is None else scale


class Block(nn.Module):
    def __init__(self, count: int = COUNT):
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, count), Mixed(count)


class Model(nn.Module):
    def __init__(self, counts=(COUNT, COUNT)):
        super().__init__()
        self.head = nn.Linear(WIDTH, 1)
        self.layers = nn.ModuleList(map(Block, counts))


PLAN = {"layers.*.experts": MODULE}
PATHS = ["layers.0.experts", "layers.1.experts"]


def paths(model: nn.Module, plan=None) -> list[str]:
    return [each.path for each in experts_of(model, plan)]


def inside(model: nn.Module) -> nn.Module:
    """A model that another one has inside, twice."""
    outer = nn.Module()
    outer.first, outer.second = model, copy.deepcopy(model)
    return outer


def refused(model: nn.Module, plan) -> str:
    with pytest.raises(ValueError) as raised:
        experts_of(model, plan)
    assert "\n" not in str(raised.value)
    return str(raised.value)


# Which modules hold experts


@pytest.mark.parametrize(
    "plan, expected",
    [
        (PLAN, PATHS),
        ({"*.*.experts": MODULE}, PATHS),
        ({"layers.1.experts": MODULE, "layers.0.experts": MODULE}, PATHS),
        ({"layers.1.experts": MODULE}, PATHS[1:]),
        ({"layers.*.exp*": MODULE}, PATHS),
        (PLAN | {"layers.*.experts.up": PARAMETER, "layers.*.experts.bias": PARAMETER}, PATHS),
        (PLAN | {"layers.0.experts.up": PARAMETER}, PATHS),
        ({}, []),
        (None, []),
    ],
)
def test_patterns_name_modules_in_the_order_of_the_model(plan, expected):
    assert paths(Model(), plan) == expected


def test_experts_are_told_with_their_parameters_and_their_number():
    first, second = experts_of(Model((4, 6)), PLAN)
    assert first == Experts(PATHS[0], ("up", "bias", "inner.scale"), 4)
    assert second.num_experts == 6
    assert second.keys == tuple(f"layers.1.experts.{name}" for name in ("up", "bias", "inner.scale"))


def test_the_model_itself_may_be_experts():
    (found,) = experts_of(Mixed(), {"": MODULE})
    assert found.keys == ("up", "bias", "inner.scale")


def test_a_model_may_say_itself_what_its_experts_are():
    model = Model()
    model.ep_plan = PLAN | {"layers.*.experts.up": PARAMETER, "layers.*.absent": MODULE}
    assert paths(model) == PATHS
    assert paths(inside(model)) == [f"{name}.{path}" for name in ("first", "second") for path in PATHS]
    assert paths(model, {"layers.0.experts": MODULE}) == PATHS[:1], "a given plan counts in its place"
    assert paths(model, {}) == []


def test_of_plans_of_nested_modules_the_outermost_counts():
    model = Model()
    for each in model.layers:
        each.ep_plan = {"experts": MODULE}
    assert paths(model) == PATHS
    model.layers.ep_plan = {"1.experts": MODULE}
    assert paths(model) == PATHS[1:]
    model.ep_plan = {"layers.0.experts": MODULE}
    assert paths(model) == PATHS[:1]


def test_a_plan_without_entries_or_of_another_kind_is_none():
    model = Model()
    model.ep_plan, model.layers.ep_plan = {}, "auto"
    model.layers[1].ep_plan = {"experts": MODULE}
    assert paths(model) == PATHS[1:]


@pytest.mark.parametrize(
    "plan, told",
    [
        (
            PLAN | {"layers.*.gate": "ep_router"},
            "expert plan: 'layers.*.gate': style must be ep_dispatch_experts or grouped_gemm, got",
        ),
        (
            {"blocks.*.experts": MODULE},
            "expert plan: 'blocks.*.experts' must name a module of the model, got",
        ),
        ({"*.experts": MODULE}, "expert plan: '*.experts' must name a module of the model, got none"),
        ({"layers.*.expert": MODULE}, "expert plan: 'layers.*.expert' must name a module of the model, got"),
        (
            {"layersx0.experts": MODULE},
            "expert plan: 'layersx0.experts' must name a module of the model, got",
        ),
        (
            {"layers.*.mlp.up": PARAMETER},
            "expert plan: 'layers.*.mlp.up' must name a module of the model, got",
        ),
        (
            {"layers.*.experts.up": PARAMETER},
            "expert plan: 'layers.*.experts.up': its module must be in the plan as ep_dispatch",
        ),
        (
            {"layers.0.experts": MODULE, "layers.*.experts.up": PARAMETER},
            "expert plan: 'layers.*.experts.up': its module must be in the plan as ep_dispatch",
        ),
    ],
)
def test_a_part_of_a_plan_is_not_taken(plan, told):
    assert refused(Model(), plan).startswith(told)


@pytest.mark.parametrize(
    "module, got",
    [
        (nn.Linear(3, 2), ""),
        (nn.Linear(3, 1), ""),
        (nn.Bilinear(2, 3, 4), ""),
        (nn.ParameterList([torch.ones(4, 2), torch.ones(3, 2)]), "0 [4, 2], 1 [3, 2]"),
        (nn.ParameterList([torch.ones(4, 2), torch.ones(())]), "0 [4, 2], 1 []"),
        (nn.ParameterList([torch.ones(())]), "0 []"),
        (nn.ParameterList([torch.ones(0, 2)]), "0 [0, 2]"),
        (nn.Tanh(), "none"),
    ],
    ids=str,
)
def test_all_parameters_have_one_part_an_expert(module, got):
    model = nn.ModuleDict({"experts": module})
    if not got:
        assert paths(model, {"experts": MODULE}) == ["experts"]
        return
    assert refused(model, {"experts": MODULE}) == (
        "expert plan: experts must hold parameters with one part an expert, along the first dimension, "
        f"got {got}"
    )


def test_experts_that_share_a_parameter_are_refused():
    model = nn.ModuleDict({"a": Mixed()})
    model["b"] = Mixed(scale=model["a"].inner.scale)
    told = "expert plan: a.inner.scale must be in one place of the model, got several"
    assert refused(model, {"*": MODULE}) == told
    assert refused(model, {"b": MODULE}) == told.replace("a.inner", "b.inner")
    model["c"] = Mixed()
    assert paths(model, {"c": MODULE}) == ["c"], "others may share"


def test_experts_that_stand_in_two_places_are_refused():
    model = nn.ModuleDict({"a": Mixed()})
    model["b"] = model["a"]
    assert "must be in one place of the model, got several" in refused(model, {"a": MODULE})


# Which stages split them


def cut(*replicas_and_split) -> Plan:
    """A stage for the head, and one for each block."""
    each = (StageSpec(s, s + 1, count, experts=split) for s, (count, split) in enumerate(replicas_and_split))
    return Plan(tuple(each))


def splitting(made: Plan, model: nn.Module, plan=PLAN):
    """What is split where the head is in the first stage, and block i in stage 1 + i."""
    holders = {key: (1 + int(key[7]) if key[0] == "l" else 0,) for key in model.state_dict()}
    return split_by(made, experts_of(model, plan), holders)


def test_only_stages_that_split_experts_have_parts():
    keys = [f"{path}.{name}" for path in PATHS for name in ("up", "bias", "inner.scale")]
    whole, two, four = (1, False), (2, True), (4, True)
    assert splitting(cut(whole, two, four), Model()) == dict.fromkeys(keys[:3], 1) | dict.fromkeys(
        keys[3:], 2
    )
    assert splitting(cut(whole, (2, False), four), Model()) == dict.fromkeys(keys[3:], 2)
    assert splitting(cut(whole, (1, True), (2, False)), Model()) == {}
    assert splitting(cut(whole, whole, two), Model(), {PATHS[1]: MODULE}) == dict.fromkeys(keys[3:], 2)


@pytest.mark.parametrize(
    "made, plan, told",
    [
        (
            cut((2, True), (1, False), (1, False)),
            PLAN,
            "stages[0].experts must be false, as the stage holds no experts, got true: the model's are in "
            "layers.0.experts and so on (expert_plan names modules of your own)",
        ),
        (
            cut((1, False), (2, True), (2, True)),
            {PATHS[1]: MODULE},
            "stages[1].experts must be false, as the stage holds no experts, got true: the model's are in "
            "layers.1.experts and so on (expert_plan names modules of your own)",
        ),
        (
            cut((1, False), (2, True), (1, False)),
            None,
            "stages[1].experts must be false, as the stage holds no experts, got true: the model names none "
            "(expert_plan names modules of your own)",
        ),
        (
            cut((1, False), (1, False), (3, True)),
            PLAN,
            "stages[2].replicas must divide the 4 experts of layers.1.experts, got 3",
        ),
        (
            cut((1, False), (2, True), (8, True)),
            PLAN,
            "stages[2].replicas must divide the 4 experts of layers.1.experts, got 8",
        ),
    ],
)
def test_a_stage_that_splits_has_experts_for_each_replica(made, plan, told):
    with pytest.raises(ValueError) as raised:
        splitting(made, Model(), plan)
    assert str(raised.value) == told


# What a rank keeps


def seeded() -> Model:
    torch.manual_seed(3)
    model = Model().double()
    model.layers[0].experts.up.is_special = True
    return model


@pytest.mark.parametrize("count", [1, 2, 4])
def test_parts_are_the_whole(count):
    whole, parts = seeded(), [seeded() for _ in range(count)]
    experts = experts_of(whole, PLAN)[0]
    for i, part in enumerate(parts):
        hold_parts(part, [experts], i, count, None)
    for key, value in whole.state_dict().items():
        own = [part.state_dict()[key] for part in parts]
        if key in experts.keys:
            assert all(each.shape == (COUNT // count, *value.shape[1:]) for each in own)
            assert torch.equal(torch.cat(own), value)
        else:
            assert all(torch.equal(each, value) for each in own)


def test_a_part_keeps_what_is_written_on_its_parameter():
    model = seeded()
    before = model.layers[0].experts.up
    hold_parts(model, experts_of(model, PLAN)[:1], 1, 2, None)
    mine, other = (model.layers[i].experts for i in (0, 1))
    assert mine.up.is_special and isinstance(mine.up, nn.Parameter) and mine.up.requires_grad
    assert not mine.bias.requires_grad and isinstance(mine.bias, nn.Parameter)
    assert held_part(mine.up) == HeldPart(before.shape, "replica", 1, 2)
    assert held_part(mine.inner.scale).shape == (2,)
    assert [held_part(each) for each in (before, *other.parameters())] == [None] * 4
    assert mine.up.untyped_storage().nbytes() == before.nbytes // 2, "the whole one can be freed"


def test_the_number_of_experts_is_the_parts_and_that_of_a_token_stays():
    model = seeded()
    hold_parts(model, experts_of(model, PLAN)[:1], 0, 2, None)
    mine, other = (model.layers[i].experts for i in (0, 1))
    assert (mine.num_experts, mine.num_experts_per_tok, mine.hidden_size) == (2, 4, 4)
    assert (other.num_experts, other.num_experts_per_tok) == (4, 4)


@pytest.mark.parametrize("name, stays", [("num_local_experts", False), ("n_experts", False), ("top_k", True)])
def test_attributes_are_numbers_of_experts_by_their_name(name, stays):
    model = seeded()
    setattr(model.layers[0].experts, name, COUNT)
    setattr(model.layers[0].experts, f"{name}_other", COUNT + 1)
    hold_parts(model, experts_of(model, PLAN)[:1], 0, 4, None)
    mine = model.layers[0].experts
    assert getattr(mine, name) == (COUNT if stays else 1) and getattr(mine, f"{name}_other") == COUNT + 1


@pytest.mark.parametrize("index", [0, 1])
def test_of_a_model_without_numbers_parts_are_made_bit_for_bit(index):
    built, whole = build(seeded), seeded()
    assert built.numbers is not None, built.why_whole
    experts = experts_of(built.model, PLAN)
    hold_parts(built.model, experts[:1], index, 2, built.numbers)
    parts = dict(built.model.named_parameters())
    for key in experts[0].keys:
        assert torch.equal(parts[key], whole.get_parameter(key).chunk(2)[index])
        assert held_part(parts[key]).shape == parts[key].shape
    assert all(parts[key].is_meta for key in parts if key not in experts[0].keys)
    assert parts[experts[0].keys[0]].is_special
    built.numbers.fill(built.model)
    for key, parameter in built.model.named_parameters():
        expected = whole.get_parameter(key)
        expected = expected.chunk(2)[index] if key in experts[0].keys else expected
        assert torch.equal(parameter, expected), key


def test_whole_forms_are_those_of_the_model_before():
    model, whole = seeded(), seeded()
    hold_parts(model, experts_of(model, PLAN)[1:], 1, 4, None)
    forms = whole_forms(model)
    assert list(forms) == list(whole.state_dict())
    for key, value in whole.state_dict().items():
        assert (forms[key].shape, forms[key].dtype) == (value.shape, value.dtype)
        assert forms[key].is_meta == key.startswith(PATHS[1]) and not forms[key].requires_grad
        assert forms[key].is_meta or torch.equal(forms[key], value)


def test_experts_with_buffers_or_hooks_are_refused():
    """A buffer has no part that is known to be a rank's, and a hook would be left with the whole."""
    model = Model()
    model.layers[1].experts.register_buffer("scales", torch.ones(COUNT))
    assert refused(model, PLAN) == "expert plan: layers.1.experts must have no buffers, got scales"
    model = Model()
    model.layers[0].experts.up.register_hook(lambda gradient: gradient)
    told = "expert plan: layers.0.experts.up must have no hooks: register them later"
    assert refused(model, PLAN) == told
