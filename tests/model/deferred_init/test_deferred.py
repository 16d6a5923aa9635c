"""A model whose numbers are made later is the model that is made at once; the zoo's are, too."""

import copy
from functools import lru_cache

import pytest
import torch
from torch import nn

from hybridpipe.model.deferred_init.deferred import build, build_from_meta
from tests import zoo


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = (
            nn.Embedding(7, 4, padding_idx=0),
            nn.BatchNorm1d(4),
            nn.Linear(4, 7),
        )
        self.head.weight = self.embed.weight
        self.register_buffer("positions", torch.arange(3) * 2, persistent=False)
        self.table = [torch.tensor([1.0, 2.0])]
        nn.init.trunc_normal_(self.embed.weight)
        self.embed.weight.is_tied = True
        for parameter in self.norm.parameters():
            parameter.requires_grad_(False)


def orthogonal() -> nn.Module:
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    nn.init.orthogonal_(model[1].weight)
    model.append(copy.deepcopy(model[0]))
    return model


def scaled() -> nn.Module:
    """Python reads numbers while the model is made."""
    model = nn.Linear(3, 3)
    model.weight.data.mul_(1 / model.weight.std().item())
    model.rates = [rate.item() for rate in torch.linspace(0, 1, 4)]
    return model


def converted() -> nn.Module:
    """Of several dtypes and formats; two modules keep one parameter, which keeps its attributes."""
    model = nn.Sequential(Tied().half(), nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last), scaled())
    model[2].to(torch.bfloat16).double()
    model.append(nn.LSTM(3, 4).bfloat16())
    nn.init.normal_(model[0].head.weight)
    return model


FACTORIES = [
    Tied,
    converted,
    orthogonal,
    scaled,
    lambda: nn.Transformer(8, 2, 1, 1, 16, batch_first=True),
    lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)),
    lambda: nn.LSTM(3, 4, num_layers=2),
]


def state_of(model: nn.Module) -> dict:
    return {**dict(model.named_buffers()), **model.state_dict()}


def same(one: nn.Module, other: nn.Module) -> bool:
    left, right = state_of(one), state_of(other)
    flags = ([(name, p.requires_grad) for name, p in each.named_parameters()] for each in (one, other))
    return (
        list(left) == list(right)
        and all(torch.equal(left[k], right[k]) for k in left)
        and next(flags) == next(flags)
    )


def seeded(factory):
    def make() -> nn.Module:
        torch.manual_seed(3)
        return factory()

    return make


@pytest.mark.parametrize("factory", FACTORIES)
def test_all_numbers_are_those_of_the_model_made_at_once(factory):
    built = build(seeded(factory))
    assert built.numbers is not None and all(p.is_meta for p in built.model.parameters())
    built.numbers.fill(built.model)
    assert same(built.model, seeded(factory)())


@pytest.mark.parametrize("name", zoo.SPLIT)
def test_real_models(name):
    built = build(lambda: zoo.CASES[name]().model)
    assert built.numbers is not None and any(p.is_meta for p in built.model.parameters())
    built.numbers.fill(built.model)
    assert same(built.model, zoo.CASES[name]().model)


def test_a_part_is_filled_and_the_rest_stays_empty():
    built = build(seeded(orthogonal))
    wanted = built.model[1]
    built.numbers.fill(built.model, wanted)
    assert [layer.weight.is_meta for layer in built.model] == [True, False, True]
    assert torch.equal(built.model[1].weight, seeded(orthogonal)()[1].weight)


def test_what_is_one_stays_one_and_keeps_its_attributes():
    built = build(Tied)
    assert built.model.head.weight is built.model.embed.weight and built.model.embed.weight.is_tied
    built.numbers.fill(built.model)
    assert built.model.head.weight is built.model.embed.weight and built.model.embed.weight.is_tied
    assert built.model.table[0].tolist() == [1.0, 2.0] and type(built.model.table[0]) is torch.Tensor


def reads_in_numpy() -> nn.Module:
    model = nn.Linear(3, 3)
    model.total = float(model.weight.detach().numpy().sum())
    return model


def hooked() -> nn.Module:
    model = nn.Linear(3, 3)
    model.weight.register_hook(lambda gradient: gradient)
    return model


@pytest.mark.parametrize("factory, why", [(reads_in_numpy, "numpy"), (hooked, "weight has a hook")])
def test_a_model_that_needs_its_numbers_is_made_at_once(factory, why):
    built = build(seeded(factory))
    assert built.numbers is None and why in built.why_whole
    assert same(built.model, seeded(factory)())


def test_the_functions_own_errors_are_its_own():
    with pytest.raises(ZeroDivisionError):
        build(lambda: 1 / 0)
    with pytest.raises(TypeError, match="must be a module or a function that returns one; dict returns"):
        build(dict)


def test_given_numbers_go_first():
    built = build(seeded(orthogonal))
    built.numbers.given["0.weight"] = lambda: torch.full((5, 5), 2.0)
    built.numbers.fill(built.model)
    assert built.model[0].weight.eq(2).all() and not built.model[1].weight.eq(2).any()


def test_measuring_takes_the_memory_of_the_largest_parameter():
    built = build(lambda: nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)), nn.BatchNorm1d(64)))
    built.numbers.fill_for_measuring(built.model)
    storages = {p.untyped_storage().data_ptr() for p in built.model.parameters()}
    assert len(storages) == 1 and not any(p.is_meta for p in built.model.parameters())
    assert built.model[8].running_var.eq(1).all()
    assert built.model(torch.randn(2, 64)).isfinite().all()


@lru_cache
def table() -> torch.Tensor:
    return torch.arange(4.0)


class Cached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("positions", table())


class Listed(nn.Module):
    """Its forward reads parameters by a list."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.weights = [self.a.weight, self.b.weight]


class Viewing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3)
        self.row = self.a.weight.detach()[0]


def measured() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model.size = model(torch.randn(2, 3)).shape[1]
    return model


def conjugate() -> nn.Module:
    model = nn.Linear(3, 3)
    model.register_buffer("turned", torch.randn(3, dtype=torch.complex64).conj() + 1)
    return model


def overwritten() -> nn.Module:
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        return Tied().half()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)


REFUSED = [
    (overwritten, "swap"),
    (Viewing, "row of a Viewing has the memory"),
    (measured, "does more than its signature says"),
    (conjugate, "conjugate"),
]


@pytest.mark.parametrize("factory, why", REFUSED)
def test_what_would_be_made_otherwise_is_made_at_once(factory, why):
    built = build(seeded(factory))
    assert built.numbers is None and why in built.why_whole, built.why_whole
    assert same(built.model, seeded(factory)())


def test_what_is_made_on_another_device_is_made_at_once():
    built = build(lambda: nn.utils.skip_init(nn.Linear, 3, 3))  # whose numbers are arbitrary
    assert built.numbers is None and "on meta" in built.why_whole


def test_a_table_that_a_function_keeps_is_found():
    table.cache_clear()
    with pytest.raises(
        ValueError, match="positions of the model has no numbers, as its function keeps tensors"
    ):
        build(Cached)
    table.cache_clear()


def test_a_list_of_parameters_follows_them():
    built = build(seeded(Listed))
    built.numbers.fill(built.model)
    assert built.model.weights[0] is built.model.a.weight and built.model.weights[1] is built.model.b.weight


def twice_seeded() -> nn.Module:
    first = nn.Linear(3, 3)
    torch.manual_seed(7)
    second = nn.Linear(3, 3)
    state = torch.get_rng_state()
    third = nn.Linear(3, 3)
    torch.set_rng_state(state)
    with torch.random.fork_rng():
        fourth = nn.Linear(3, 3)
    return nn.Sequential(first, second, third, fourth, nn.Linear(3, 3))


def test_random_states_that_are_set_again_are_followed():
    built, plain = build(seeded(twice_seeded)), seeded(twice_seeded)()
    after = torch.rand(1)
    build(seeded(twice_seeded))
    assert torch.equal(torch.rand(1), after), "the generator goes on as after the model made at once"
    built.numbers.fill(built.model)
    assert same(built.model, plain)


def test_weights_of_a_file_leave_no_view_of_old_ones():
    def viewing() -> nn.Module:
        model = nn.Linear(3, 3)
        model.register_buffer("row", model.weight.detach()[0], persistent=False)
        return model

    built = build(viewing)
    built.numbers.given["weight"] = lambda: torch.zeros(3, 3)
    with pytest.raises(ValueError, match="row of the model is a view of a tensor whose numbers a file gives"):
        built.numbers.fill(built.model)


def on_meta(make) -> nn.Module:
    with torch.device("meta"):
        return make()


def plain() -> nn.Module:
    model = nn.Sequential(
        nn.Linear(5, 5),
        nn.BatchNorm1d(5),
        nn.TransformerEncoderLayer(4, 2, 8),
        nn.LSTM(3, 4),
        nn.Linear(5, 5),
    )
    model[4].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    return model


def test_modules_on_the_meta_device_start_as_their_initialisers_say():
    torch.manual_seed(3)
    built = build_from_meta(on_meta(plain))
    assert all(p.is_meta for p in built.model.parameters())
    built.numbers.fill(built.model)
    torch.manual_seed(3)
    at_once = plain()
    assert torch.equal(built.model[0].bias, at_once[0].bias), "a Linear's constructor draws as it does"
    state = built.model.state_dict()
    assert built.model[4].weight is built.model[0].weight and not built.model[0].bias.requires_grad
    assert state["1.running_var"].eq(1).all() and state["2.norm1.weight"].eq(1).all()
    assert state["3.weight_hh_l0"].abs().max() <= 0.5 and state["3.weight_hh_l0"].std() > 0.1
    assert state["2.self_attn.out_proj.bias"].eq(0).all()


def test_a_part_of_a_model_on_the_meta_device_is_as_in_the_whole():
    found = []
    for part in (None, 2):
        torch.manual_seed(3)
        built = build_from_meta(on_meta(plain))
        built.numbers.fill(built.model, *([] if part is None else [built.model[part]]))
        found.append(built.model[2].state_dict())
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[0])


def test_a_function_that_builds_on_the_meta_device_is_as_its_model():
    torch.manual_seed(3)
    built = build(lambda: on_meta(plain))
    torch.manual_seed(3)
    other = build_from_meta(on_meta(plain))
    for each in (built, other):
        each.numbers.fill(each.model)
    assert same(built.model, other.model)


class Scaled(nn.Module):
    """Has a parameter that nothing sets."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(3, 3), nn.Parameter(torch.ones(3))


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(3.0), persistent=False)


class Tabled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.table = nn.Linear(3, 3), torch.arange(3.0)


def test_what_nothing_sets_is_given_or_refused():
    built = build_from_meta(on_meta(Scaled))
    with pytest.raises(ValueError, match="scale of a Scaled is on the meta device, and no reset_parameters"):
        built.numbers.fill(built.model)
    assert built.numbers.lacks
    built.numbers.given["scale"] = lambda: torch.full((3,), 2.0)
    built.numbers.fill(built.model)
    assert built.model.scale.eq(2).all() and not built.numbers.lacks


@pytest.mark.parametrize(
    "make, why",
    [
        (Rotary, "table of the model is on the meta device, and no file has it: pass the function"),
        (Tabled, "table of a Tabled has no numbers: pass the function"),
        (lambda: nn.LazyLinear(3), "pass the function"),
    ],
)
def test_what_can_be_had_from_nowhere_is_refused(make, why):
    with pytest.raises(ValueError, match=why):
        build_from_meta(on_meta(make))
