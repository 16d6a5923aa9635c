import pytest
import torch

from hybridpipe.stage.values import map_tensors, rebuild, tensors_of

A, B = torch.ones(2), torch.arange(3)


@pytest.mark.parametrize("value, count", [(A, 1), ((A,), 1), ((A, B), 2), ((), 0)])
def test_rebuild_is_the_inverse_of_tensors_of(value, count):
    tensors = tensors_of(value)
    assert len(tensors) == count
    back = rebuild(tensors, like=value)
    assert type(back) is type(value) and tensors_of(back) == tensors


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
