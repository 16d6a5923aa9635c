"""A state as tensors and JSON: nothing is lost or pickled, and a state that does not fit is refused."""

import copy
import json
import random
from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from hybridpipe.errors import UserError
from hybridpipe.model.held_part import HeldPart, held_part, part_of
from hybridpipe.model.stage_module import StageModule
from hybridpipe.stage.state import (
    BATCHES_AGREED,
    PARTS,
    SAMPLES_SEEN,
    Generators,
    OfParameter,
    StageState,
    batches_agreed,
    check_fits,
    check_optimizer,
    described,
    differences,
    pack,
    prefixed,
    put_optimizer,
    put_parts,
    read_optimizer,
    read_parts,
    samples_seen,
    shared_tensors,
    take_optimizer,
    under,
    unpack,
)

optim = torch.optim
OPTIMIZERS = {
    "sgd": partial(optim.SGD, lr=0.1),
    "momentum": partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": partial(optim.Adam, lr=0.1, amsgrad=True),
    "adamw": partial(optim.AdamW, lr=torch.tensor(0.1)),
    "adagrad": partial(optim.Adagrad, lr=0.1),
    "adadelta": partial(optim.Adadelta, lr=0.1),
    "adamax": partial(optim.Adamax, lr=0.1),
    "asgd": partial(optim.ASGD, lr=0.1),
    "nadam": partial(optim.NAdam, lr=0.1),
    "radam": partial(optim.RAdam, lr=0.1),
    "rmsprop": partial(optim.RMSprop, lr=0.1, momentum=0.5, centered=True),
    "rprop": partial(optim.Rprop, lr=0.1),
}
SCHEDULERS = {
    "step": partial(lr_scheduler.StepLR, step_size=2),
    "milestones": partial(lr_scheduler.MultiStepLR, milestones=[2, 5]),  # a Counter
    "lambda": partial(lr_scheduler.LambdaLR, lr_lambda=lambda epoch: 0.9**epoch),
    "cosine": partial(lr_scheduler.CosineAnnealingLR, T_max=7),
    "restarts": partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=3),
    "one cycle": partial(lr_scheduler.OneCycleLR, max_lr=0.3, total_steps=20),
    "sequence": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.ConstantLR(optimizer, 0.1, 3), lr_scheduler.ExponentialLR(optimizer, 0.9)],
        milestones=[3],
    ),
}


def make_layers(dtype=torch.float64) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).to(dtype)


def named(layers: nn.Sequential) -> StageModule:
    return StageModule(list(layers), names=["a", "b", "c"])


def train(layers, optimizer, scheduler, steps):
    generator = torch.Generator().manual_seed(len(steps))
    for step in steps:
        generator.manual_seed(step)
        optimizer.zero_grad()
        dtype = next(layers.parameters()).dtype
        layers(torch.randn(5, 3, generator=generator).to(dtype)).square().mean().backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return [p.detach().clone() for p in layers.parameters()]


def through_text(state: StageState) -> StageState:
    """Return the state as read back from a file."""
    return StageState(
        {name: tensor.clone() for name, tensor in state.tensors.items()}, json.loads(json.dumps(state.meta))
    )


@pytest.mark.parametrize(
    "name, scheduler, dtype",
    [
        *((name, None, torch.float64) for name in OPTIMIZERS),
        *(("momentum", name, torch.float64) for name in SCHEDULERS),
        ("adam", None, torch.bfloat16),  # torch's own load_state_dict would cast its state
    ],
)
def test_an_optimizer_goes_on_as_if_nothing_had_happened(name, scheduler, dtype):
    layers = make_layers(dtype)
    optimizer = OPTIMIZERS[name](layers.parameters())
    steps = None if scheduler is None else SCHEDULERS[scheduler](optimizer)
    train(layers, optimizer, steps, range(4))
    state = StageState()
    take_optimizer(optimizer, named(layers).parameters(), state)
    if steps is not None:
        state.meta["steps"] = pack(steps.state_dict(), "steps", state.tensors)
    saved, then = through_text(state), copy.deepcopy(layers)
    expected = train(layers, optimizer, steps, range(4, 9))

    other = OPTIMIZERS[name](then.parameters())
    names, found = named(then).parameters(), read_optimizer(saved, "file")
    check_optimizer(other, names, found, "file")
    other_steps = None if scheduler is None else SCHEDULERS[scheduler](other)
    put_optimizer(other, names, found)
    if other_steps is not None:
        other_steps.load_state_dict(unpack(saved.meta["steps"], saved.tensors, "file"))
    after = train(then, other, other_steps, range(4, 9))
    assert all(map(torch.equal, after, expected)) and all(p.isfinite().all() for p in after)


def test_how_a_step_is_computed_is_the_new_optimizers():
    """A checkpoint without the user's `fused = false` once made the steps fused again."""
    layers = make_layers(torch.float32)
    state = StageState()
    take_optimizer(torch.optim.SGD(layers.parameters(), lr=0.3), named(layers).parameters(), state)
    other = torch.optim.SGD(layers.parameters(), lr=0.1, fused=False)
    put_optimizer(other, named(layers).parameters(), read_optimizer(through_text(state), "file"))
    (group,) = other.param_groups
    assert group["fused"] is False and group["lr"] == 0.3


def test_values_come_back_with_their_types():
    value = {
        "numbers": [1, 2.5, float("inf"), -0.0, True, None, "text"],
        "tuple": (1, (2, torch.arange(3))),
        "by number": {3: "a", 4: torch.ones(1)},
        "counted": Counter({3: 2}),
        "$tensor": "not one",
    }
    tensors: dict[str, torch.Tensor] = {}
    back = unpack(json.loads(json.dumps(pack(value, "v", tensors))), tensors, "file")
    assert type(back["counted"]) is Counter and back["tuple"][1][0] == 2
    torch.testing.assert_close(back.pop("tuple")[1][1], value.pop("tuple")[1][1])
    torch.testing.assert_close(back["by number"].pop(4), value["by number"].pop(4))
    assert back == value and str(back["numbers"]) == str(value["numbers"])
    assert np.isnan(unpack(pack(float("nan"), "v", {}), {}, "file"))
    assert pack(np.float64(1.5), "v", {}) == 1.5


@pytest.mark.parametrize("value", [object(), print, b"bytes", {"a": [lambda: 0]}, nn.Linear(1, 1), {1, 2}])
def test_what_is_neither_tensor_nor_json_is_refused(value):
    with pytest.raises(UserError, match=r"^lr_scheduler.*: a checkpoint holds tensors, numbers and text"):
        pack(value, "lr_scheduler", {})


@pytest.mark.parametrize(
    "document",
    [
        {"$tensor": "none"},
        {"$tuple": 3},
        {"$pairs": [[1]]},
        {"$float": "1"},
        {"$what": 1},
        {"$tensor": "x", "a": 1},
    ],
)
def test_what_was_never_packed_is_refused(document):
    with pytest.raises(UserError, match=r"^stage-000.safetensors: .*(missing|pairs|understood)"):
        unpack(document, {}, "stage-000.safetensors")


def test_groups_with_other_options_are_not_mixed():
    """Two stages' parameters had different rates; in one group, one of the rates would be lost."""
    layers = make_layers()
    first, second = [*layers[0].parameters()], [*layers[2].parameters()]
    state = StageState()
    groups = [{"params": first}, {"params": [*layers[1].parameters()]}, {"params": second, "lr": 0.5}]
    take_optimizer(optim.SGD(groups, lr=0.1), named(layers).parameters(), state)
    found = read_optimizer(through_text(state), "file")
    names = named(layers).parameters()
    check_optimizer(optim.SGD([{"params": second}, {"params": first}], lr=9.0), names, found, "file")
    with pytest.raises(UserError, match=r"^file: a.weight and c.weight, .* had different options: "):
        check_optimizer(optim.SGD(layers.parameters(), lr=0.1), names, found, "file")
    del found["c.bias"]
    with pytest.raises(UserError, match=r"^file: has no optimizer state of c.bias, which is trained now$"):
        check_optimizer(optim.SGD([{"params": second}], lr=0.1), names, found, "file")


def test_a_model_that_does_not_fit_is_named():
    model = make_layers().state_dict()
    found = described(model)
    check_fits(found, model, "file")
    with pytest.raises(
        UserError, match=r"^file: 0.weight: .* has float64\[4, 3\], the file float64\[4, 9\]$"
    ):
        check_fits(found | {"0.weight": "float64[4, 9]"}, model, "file")
    with pytest.raises(UserError, match=r"^file: 7.weight: .* has none, the file float64\[1\]$"):
        check_fits(found | {"7.weight": "float64[1]"}, model, "file")
    del found["2.bias"]
    with pytest.raises(UserError, match=r"^file: 2.bias: the model has float64\[2\], the file none$"):
        check_fits(found, model, "file")


def test_tied_parameters_have_one_name():
    layers = make_layers()
    layers[2].weight = layers[0].weight
    assert sorted(named(layers).parameters().values()) == [
        "a.bias",
        "a.weight",
        "b.bias",
        "b.weight",
        "c.bias",
    ]
    assert "c.weight" in named(layers).tensors()


def test_generators_go_on():
    cpu = torch.device("cpu")
    random.gauss(0, 1)  # Python keeps the other number of the pair
    np.random.randn()
    state = through_text(Generators.now(cpu).state())
    drawn = torch.rand(3), random.gauss(0, 1), random.random(), np.random.randn(), np.random.rand()
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    Generators.of(state, "file").put(cpu)
    again = torch.rand(3), random.gauss(0, 1), random.random(), np.random.randn(), np.random.rand()
    assert torch.equal(drawn[0], again[0]) and drawn[1:] == again[1:]


@pytest.mark.parametrize("name", ["random.cpu", "random.numpy", "random.python"])
def test_generators_that_are_none_are_refused(name):
    state = Generators.now(torch.device("cpu")).state()
    state.tensors[name] = torch.zeros(3, dtype=state.tensors[name].dtype)
    with pytest.raises(UserError, match=r"^file: random states cannot be understood: "):
        Generators.of(state, "file")


def test_what_statistics_have_seen_is_read_or_refused():
    assert samples_seen({SAMPLES_SEEN: 0}, "file") == 0 and samples_seen({SAMPLES_SEEN: 7}, "file") == 7
    assert samples_seen({}, "file") == samples_seen([], "file") == 1  # all ranks count alike
    for wrong in (-1, 1.0, True, "1"):
        with pytest.raises(UserError, match=r"^file: statistics_samples: must be an integer >= 0, got "):
            samples_seen({SAMPLES_SEEN: wrong}, "file")


def test_batches_that_replicas_agreed_on_are_read_or_refused():
    assert batches_agreed({BATCHES_AGREED: {"1.num_batches_tracked": 3}}, "file") == {
        "1.num_batches_tracked": 3
    }
    assert batches_agreed({}, "file") == batches_agreed([], "file") == {}
    for wrong in ({"a": 1.0}, {"a": 1, "b": None}, [1]):
        with pytest.raises(UserError, match=r"^file: statistics_batches: must hold integers, got "):
            batches_agreed({BATCHES_AGREED: wrong}, "file")


@pytest.mark.parametrize(
    "entry",
    [
        {"group": -1, "state": {}},
        {"group": 1, "state": {}},
        {"group": 2, "state": {}},
        {"group": 0, "state": []},
        {"state": {}},
    ],
)
def test_an_optimizers_entry_of_no_group_is_refused(entry):
    state = StageState(meta={"groups": [{"lr": 0.1}, 5], "parameters": {"a.weight": entry}})
    with pytest.raises(UserError, match=r"^file: parameter a.weight: cannot be understood: "):
        read_optimizer(state, "file")


def test_options_that_an_older_checkpoint_was_not_told_are_none():
    entries = {key: {"group": at, "state": {}} for key, at in (("a", 0), ("b", 1))}
    state = StageState(
        meta={"groups": [{"lr": 0.1}, {"lr": 0.2}], "given": [{"lr": 1.0}], "parameters": entries}
    )
    found = read_optimizer(state, "file")
    assert [found[key].options["lr"] for key in "ab"] == [0.1, 0.2]
    assert (found["a"].given, found["b"].given) == ({"lr": 1.0}, None)


def test_options_that_differ_are_told_but_for_how_a_step_is_computed():
    now = {"lr": 0.1, "betas": (0.9, 0.99), "fused": True, "new": 1, "rate": torch.tensor(0.1)}
    then = {"lr": 0.2, "betas": (0.9, 0.99), "fused": None, "old": 1, "rate": torch.tensor(0.1)}
    assert differences(now, then) == [("lr", 0.1, 0.2)]
    both = torch.tensor([0.1, 0.2])
    assert differences({"rates": both}, {"rates": both.clone()}) == []
    assert [name for name, *_ in differences({"a": 0.1, "b": both}, {"a": both, "b": 0.1})] == ["a", "b"]
    assert differences({"rate": torch.tensor(0.1), "n": 1}, {"rate": 0.1, "n": True}) == [
        ("rate", torch.tensor(0.1), 0.1),
        ("n", 1, True),
    ]


def test_buffers_that_no_state_dict_has_are_kept_too():
    model = nn.Sequential(nn.Linear(2, 2), nn.Module())
    model[1].register_buffer("scratch", torch.zeros(3), persistent=False)
    model[1].register_buffer("nothing", None, persistent=False)
    assert set(shared_tensors(model)) == {"0.weight", "0.bias", "1.scratch"}
    assert shared_tensors(model)["1.scratch"] is model[1].scratch


def test_state_that_an_optimizer_keeps_of_no_parameter_is_refused():
    layers = make_layers()
    optimizer = optim.SGD(layers.parameters(), lr=0.1)
    optimizer.state["calls"] = {"count": 3}
    with pytest.raises(UserError, match="SGD keeps state of no parameter: 'calls'"):
        take_optimizer(optimizer, named(layers).parameters(), StageState())


@pytest.mark.parametrize("option", ["capturable", "fused"])
def test_a_step_count_is_on_the_host_unless_the_device_counts(option):
    """A step on another device makes an optimizer of the plain form wait for that device."""
    layers = nn.Sequential(nn.Linear(2, 2, device="meta"))
    optimizer = optim.Adam(layers.parameters(), lr=0.1)
    found = {}
    for key in ("0.weight", "0.bias"):
        found[key] = OfParameter({}, {"step": torch.tensor(1.0), "exp_avg": torch.zeros(2)})
    names = {p: key for key, p in layers.named_parameters()}
    put_optimizer(optimizer, names, found, options_too=False)
    assert [value.device.type for value in optimizer.state[layers[0].weight].values()] == ["cpu", "meta"]
    optimizer.param_groups[0][option] = True
    put_optimizer(optimizer, names, found, options_too=False)
    assert [value.device.type for value in optimizer.state[layers[0].weight].values()] == ["meta", "meta"]


def test_a_copy_does_not_follow_training():
    weight = torch.zeros(3, requires_grad=True)
    copy = StageState({"a": weight}, {"step": 1}).copied()
    weight.data += 1
    assert copy.tensors["a"].eq(0).all() and not copy.tensors["a"].requires_grad and copy.meta == {"step": 1}


def test_groups_are_told_with_the_options_that_they_were_made_with():
    """The stage has parameters of the last two of three groups."""
    layers = make_layers()
    groups = [{"params": [*layers[i].parameters()], "lr": 0.1 * i} for i in range(3)]
    optimizer, state = optim.SGD(groups), StageState()
    names = {p: name for name, p in layers.named_parameters() if not name.startswith("0")}
    take_optimizer(optimizer, names, state, [{"lr": 1.0}, {"lr": 2.0}, {"lr": 3.0}])
    found = read_optimizer(through_text(state), "file")
    assert state.meta["num_groups"] == 3
    assert found.keys() == set(names.values())
    told = {(key[0], each.options["lr"], each.given["lr"]) for key, each in found.items()}
    assert told == {("1", 0.1, 2.0), ("2", 0.2, 3.0)}


def test_an_optimizers_lists_and_tables_of_tensors_come_back():
    layers = nn.Sequential(nn.Linear(2, 1, bias=False))
    optimizer, (weight,) = optim.SGD(layers.parameters(), lr=0.1), layers.parameters()
    kept_by_it = {"seen": [torch.ones(2), 3], "by name": {"a": torch.zeros(1)}}
    put_optimizer(optimizer, {weight: "w"}, {"w": OfParameter({"lr": 0.5, "fused": True}, kept_by_it)})
    assert optimizer.param_groups[0]["lr"] == 0.5 and not optimizer.param_groups[0]["fused"]
    state = optimizer.state[weight]
    assert torch.equal(state["seen"][0], torch.ones(2)) and state["seen"][1] == 3
    assert torch.equal(state["by name"]["a"], torch.zeros(1))
    put_optimizer(optimizer, {weight: "w"}, {})
    assert not optimizer.state and optimizer.param_groups[0]["lr"] == 0.5


def test_a_frozen_parameter_needs_no_state():
    layers = make_layers()
    layers[0].requires_grad_(False)
    names = {p: name for name, p in layers.named_parameters()}
    trained = {name: OfParameter({"lr": 0.1}, {}) for name in names.values() if not name.startswith("0")}
    check_optimizer(optim.SGD(layers.parameters(), lr=0.1), names, trained, "file")


def test_names_go_under_a_prefix_and_out_of_it():
    one = {"0.weight": torch.ones(1)}
    both = prefixed("version.1", one) | prefixed("version.10", {"x": torch.ones(2)})
    assert under("version.1", both) == one


# Parts of parameters


def parts_of(whole: torch.Tensor, count: int) -> list[nn.Parameter]:
    """What each replica has of a parameter."""
    return [part_of(whole, whole, HeldPart(whole.shape, "replica", i, count)) for i in range(count)]


def test_parts_of_parameters_come_back_and_are_the_whole():
    whole = {"a.up": torch.randn(4, 3, 2), "a.bias": torch.randn(4).double()}
    joined = {key: torch.zeros_like(tensor) for key, tensor in whole.items()}
    for own in zip(*(parts_of(tensor, 2) for tensor in whole.values()), strict=True):
        state, tensors = StageState({"model.a.gate": torch.ones(1)}, {"step": 1}), dict(zip(whole, own))
        put_parts(state, tensors)
        assert list(state.tensors) == ["model.a.gate", "part.a.up", "part.a.bias"]
        assert not any(each.requires_grad for each in state.tensors.values())
        back = through_text(state)
        found = read_parts(back.meta, "file")
        assert found == {key: held_part(tensor) for key, tensor in tensors.items()}
        assert back.meta["step"] == 1
        for key, part in found.items():
            part.put(joined[key], under("part", back.tensors)[key])
    assert all(torch.equal(joined[key], whole[key]) for key in whole)


def test_of_no_parts_none_are_read():
    state = StageState()
    put_parts(state, {})
    assert state.meta == {PARTS: {}} and state.tensors == {}
    for meta in (state.meta, {}, {"step": 1}, None, []):
        assert read_parts(meta, "file") == {}


PART = {"whole": [4, 2], "axis": "shard", "index": 1, "count": 2, "dim": 0, "packs": 1}


@pytest.mark.parametrize(
    "entry",
    [
        None,
        [],
        {},
        {name: value for name, value in PART.items() if name != "dim"},
        PART | {"more": 1},
        PART | {"axis": 1},
        PART | {"whole": []},
        PART | {"whole": 8},
        PART | {"whole": [4, 2.0]},
        PART | {"whole": [4, "2"]},
        PART | {"whole": [True, 2]},
        PART | {"whole": [-4, 2]},
        PART | {"whole": [3, 2]},
        PART | {"index": 2},
        PART | {"index": -1},
        PART | {"index": None},
        PART | {"count": 0},
        PART | {"count": 3},
        PART | {"dim": 2},
        PART | {"dim": "0"},
        PART | {"packs": 0},
        PART | {"packs": 4},
    ],
    ids=str,
)
def test_a_damaged_part_is_named(entry):
    with pytest.raises(UserError, match="file: part of b: cannot be understood: ") as raised:
        read_parts({PARTS: {"a": PART, "b": entry}}, "file")
    assert "\n" not in str(raised.value)
    assert read_parts({PARTS: {"a": PART}}, "file") == {"a": HeldPart(torch.Size([4, 2]), "shard", 1, 2)}


def test_parts_are_an_object():
    with pytest.raises(UserError, match="file: parts: must be an object, got "):
        read_parts({PARTS: [1]}, "file")


def test_an_optimizers_state_of_a_part_says_what_it_is_of():
    whole = torch.randn(4, 3)
    own = parts_of(whole, 2)[1]
    optimizer, state = optim.Adam([own], lr=0.1), StageState()
    own.grad = torch.ones_like(own)
    optimizer.step()
    take_optimizer(optimizer, {own: "a"}, state, held_parts={own: held_part(own)})
    found = read_optimizer(through_text(state), "file")["a"]
    assert found.part is None and found.held == held_part(own)
    assert {name: tuple(each.shape) for name, each in found.state.items()} == {
        "step": (),
        "exp_avg": (2, 3),
        "exp_avg_sq": (2, 3),
    }
    assert all(torch.equal(found.state[name], optimizer.state[own][name]) for name in found.state)


def test_a_damaged_part_of_an_optimizers_state_is_named():
    state = StageState(meta={"groups": [{}], "parameters": {"a": {"group": 0, "state": {}, "held": {}}}})
    with pytest.raises(UserError, match=r"^file: a: held: cannot be understood: \{\}$"):
        read_optimizer(state, "file")
