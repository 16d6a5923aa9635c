import pytest
import torch
from torch import nn

from hybridpipe.model.tensors import map_tensors, named_leaves, not_finite, tensors_in, tensors_of, tied

A, B = torch.ones(2), torch.arange(3)


@pytest.mark.parametrize("value, count", [(A, 1), ((A,), 1), ((A, B), 2), ((), 0)])
def test_a_boundary_is_crossed_by_a_tensor_or_a_tuple(value, count):
    tensors = tensors_of(value)
    assert len(tensors) == count and list(tensors) == tensors_in(value)


def test_any_tree_keeps_its_containers_and_what_is_no_tensor():
    tree = {"ids": A, "more": [(B, None), 0.5, "a text"]}
    assert tensors_in(tree) == [A, B]
    assert [key for key, _ in named_leaves(tree=tree)][:3] == [
        "tree['ids']",
        "tree['more'][0][0]",
        "tree['more'][0][1]",
    ]
    doubled = map_tensors(lambda t: 2 * t, tree)
    assert doubled["ids"].tolist() == [2, 2] and doubled["more"][1:] == [0.5, "a text"]
    assert doubled["more"][0][0].tolist() == [0, 2, 4] and doubled["more"][0][1] is None


def test_a_function_meets_every_tensor_and_the_kind_of_value_stays():
    assert map_tensors(lambda t: t + 1, A).tolist() == [2, 2]
    first, second = map_tensors(lambda t: t + 1, (A, B))
    assert first.tolist() == [2, 2] and second.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    "value, told",
    [
        ([A], "got list"),
        ((A, None), "got NoneType in tuple"),
        ((A, (A, B)), "got tuple in tuple"),
        (3, "got int"),
    ],
)
def test_anything_else_is_refused(value, told):
    with pytest.raises(TypeError, match=f"a tensor or a tuple of tensors, {told}"):
        tensors_of(value)


NAN, INFINITY = float("nan"), float("inf")
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", FLOATS)
def test_what_is_not_finite_is_counted(dtype):
    assert not_finite(torch.tensor([1.0, -2.0]).to(dtype)) is None
    bad = torch.tensor([[NAN, 1.0, -INFINITY], [NAN, INFINITY, 0.0]]).to(dtype)
    assert not_finite(bad) == not_finite(bad.t()) == "2 NaN and 2 infinite of 6"


def test_types_without_infinity_or_order_are_looked_at_too():
    """NaN in complex numbers was once missed, and torch cannot compare floats of eight bits."""
    assert not_finite(torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn)) is None
    assert not_finite(torch.tensor([1.0, NAN]).to(torch.float8_e4m3fn)) == "1 NaN and 0 infinite of 2"
    numbers = torch.tensor([1 + 1j, complex(0, NAN), complex(INFINITY, 0)])
    assert not_finite(numbers) == not_finite(numbers.conj()) == "1 NaN and 1 infinite of 3"
    assert not_finite(numbers[:1].conj()) is None


@pytest.mark.parametrize("tensor", [B, B > 0, torch.empty(0), torch.full((2,), 3e38), A.to_sparse()])
def test_what_is_no_number_or_merely_large_passes(tensor):
    """A sum of the largest numbers overflows; sparse tensors are refused elsewhere."""
    assert not_finite(tensor) is None


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_one_tensor_with_several_names_is_found_on_any_device(device):
    first, second = nn.Linear(3, 3, device=device), nn.Linear(3, 3, device=device)
    second.weight = first.weight
    model = nn.ModuleDict({"a": first, "b": second, "c": nn.Linear(3, 3, device=device), "d": first})
    assert tied(model.state_dict()) == {"b.weight": "a.weight", "d.weight": "a.weight", "d.bias": "a.bias"}
    rows = torch.zeros(4, 3, device=device)
    assert tied({"whole": rows, "first": rows[:1], "last": rows[1:], "none": rows[:0], "no": rows[:0]}) == {}
