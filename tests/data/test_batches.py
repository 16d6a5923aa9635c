import random
from itertools import chain

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

from hybridpipe.data import batches
from hybridpipe.data.batches import Microbatches, parts_of
from hybridpipe.data.stream import microbatch_sizes, slice_minibatch


class Counted(Dataset):
    """Sample i is ([i, i], i), and notes who was asked for."""

    def __init__(self, length: int):
        self.length, self.asked = length, []

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.asked.append(index)
        return torch.tensor([index, index]), index


def minibatches(*args, **options):
    return batches.minibatches(Microbatches(*args, **options))


def order(dataset, *args, **options) -> list[list[int]]:
    """The targets of each minibatch."""
    return [
        torch.cat([batch.targets(m) for m in range(len(batch.sizes))]).tolist()
        for batch in minibatches(dataset, *args, **options)
    ]


def numbers(length: int) -> TensorDataset:
    return TensorDataset(torch.arange(length).repeat(2, 1).t(), torch.arange(length))


@pytest.mark.parametrize("make", [numbers, Counted])
def test_in_order_the_last_minibatch_is_short(make):
    assert order(make(7), 3, 2) == [[0, 1, 2], [3, 4, 5], [6]]
    assert [batch.sizes for batch in minibatches(make(7), 4, 3)] == [[3, 1], [3]]
    assert [batch.num_samples for batch in minibatches(make(7), 4, 3)] == [4, 3]


@pytest.mark.parametrize("make", [numbers, Counted])
def test_every_sample_comes_once(make):
    for epoch in range(3):
        shuffled = order(make(23), 5, 2, seed=1, epoch=epoch, shuffle=True)
        assert sorted(chain(*shuffled)) == list(range(23))
        assert [len(batch) for batch in shuffled] == [5, 5, 5, 5, 3]


def test_the_order_depends_on_seed_and_epoch_alone():
    def shuffled(seed, epoch, microbatch_size=2, dataset=None):
        return list(
            chain(*order(dataset or numbers(20), 6, microbatch_size, seed=seed, epoch=epoch, shuffle=True))
        )

    expected = shuffled(1, 2)
    torch.manual_seed(random.randrange(1000))
    torch.rand(3)
    assert (
        shuffled(1, 2) == shuffled(1, 2, microbatch_size=3) == shuffled(1, 2, dataset=Counted(20)) == expected
    )
    assert len({tuple(shuffled(seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9


def test_shuffling_leaves_the_random_state_of_the_process_alone():
    state = torch.get_rng_state()
    order(numbers(20), 6, 2, shuffle=True)
    assert torch.equal(torch.get_rng_state(), state)


def test_inputs_and_targets_belong_together():
    for batch in minibatches(Counted(9), 4, 2, shuffle=True):
        for m in range(len(batch.sizes)):
            assert torch.equal(batch.inputs(m), batch.targets(m).repeat(2, 1).t())


def test_microbatches_are_loaded_where_they_are_asked_for():
    dataset = Counted(10)
    first, *_ = minibatches(dataset, 8, 2)
    assert dataset.asked == []
    first.targets(3)
    assert dataset.asked == [6, 7]
    first.inputs(1)
    first.targets(1)  # of the same microbatch: loaded once
    assert dataset.asked == [6, 7, 2, 3]


class Doubled(TensorDataset):
    """Augments, as a user's subclass may."""

    def __getitem__(self, index):
        inputs, target = super().__getitem__(index)
        return 2 * inputs, target


def test_a_subclass_of_tensor_dataset_is_asked_for_its_samples():
    batch = next(minibatches(Doubled(torch.ones(4, 2), torch.arange(4)), 4, 2))
    assert batch.inputs(0).eq(2).all()


class Drawn(Dataset):
    """Three draws, one of each generator."""

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return torch.tensor([torch.rand(()), random.random(), np.random.random()]), index


def drawn(microbatch_size=2, **options) -> dict[int, tuple[float, ...]]:
    """By sample."""
    found = {}
    for batch in minibatches(Drawn(), 4, microbatch_size, **options):
        for m in reversed(range(len(batch.sizes))):
            found |= dict(zip(batch.targets(m).tolist(), map(tuple, batch.inputs(m).tolist()), strict=True))
    return found


def test_what_a_sample_draws_follows_from_seed_epoch_and_sample_alone():
    expected = drawn(seed=1, epoch=2)
    torch.rand(1), random.random(), np.random.random()
    assert drawn(microbatch_size=3, seed=1, epoch=2, shuffle=True) == expected
    every = [*expected.values(), *drawn(seed=1, epoch=3).values(), *drawn(seed=2, epoch=2).values()]
    assert len({draw for draws in every for draw in draws}) == 3 * 3 * 6


def test_loading_leaves_the_random_states_of_the_process_alone():
    def next_draws():
        return torch.rand(3).tolist(), random.random(), np.random.random()

    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    expected = next_draws()
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    drawn()
    assert next_draws() == expected


def test_a_subset():
    assert order(Subset(numbers(10), [7, 3, 5]), 2, 1) == [[7, 3], [5]]


class Pairs(Dataset):
    def __len__(self):
        return 5

    def __getitem__(self, index):
        return (torch.full((2,), index), index % 2 == 0), (float(index), index)


def test_tuples_stay_tuples():
    batch = next(minibatches(Pairs(), 5, 3))
    tokens, mask = batch.inputs(0)
    assert tokens.shape == (3, 2) and mask.tolist() == [True, False, True]
    values, labels = batch.targets(1)
    assert values.dtype == torch.float64 and labels.tolist() == [3, 4]


def test_slices_of_a_minibatch_in_memory():
    inputs, targets = torch.arange(10).view(5, 2), torch.arange(5)
    batch = slice_minibatch((inputs, targets), targets, 2)
    assert batch.sizes == [2, 2, 1] and batch.num_samples == 5
    first, second = batch.inputs(2)
    assert first.tolist() == [[8, 9]] and second.tolist() == [4]
    assert batch.targets(1).tolist() == [2, 3]


def test_a_minibatch_in_memory_may_be_any_tree():
    inputs = {"ids": torch.arange(10).view(5, 2), "options": [None, 0.5, True]}
    batch = slice_minibatch(inputs, {"labels": torch.arange(5)}, 3)
    assert batch.sizes == [3, 2]
    assert batch.inputs(1)["ids"].tolist() == [[6, 7], [8, 9]]
    assert batch.inputs(1)["options"] == [None, 0.5, True]
    assert batch.targets(0)["labels"].tolist() == [0, 1, 2]
    with pytest.raises(TypeError, match=r"must hold tensors, .* got str as inputs\['names'\]\[0\]"):
        slice_minibatch({"ids": torch.ones(1), "names": ["a"]}, torch.ones(1), 1)


@pytest.mark.parametrize(
    "inputs, targets, told",
    [
        (torch.ones(5, 2), torch.ones(4), r"equally many samples, .* got 5 in inputs and 4 in targets"),
        (
            (torch.ones(5), torch.ones(3)),
            torch.ones(5),
            r"equally .* 5 in inputs\[0\] and 3 in inputs\[1\]",
        ),
        ({"ids": torch.ones(5)}, {"mask": torch.ones(3, 5)}, r"equally .* 5 in inputs\['ids'\] and 3 in"),
        (torch.ones(5), {"weight": torch.ones(())}, r"equally .* and 0 in targets\['weight'\]"),
        (torch.ones(0, 2), torch.ones(0), "at least one sample, got none"),
    ],
)
def test_what_cannot_be_sliced_is_refused(inputs, targets, told):
    with pytest.raises(ValueError, match=f"inputs and targets must hold {told}"):
        slice_minibatch(inputs, targets, 2)


@pytest.mark.parametrize(
    "share, minibatch, parts",
    [(8, 32, [4, 2]), (4, 16, [2]), (6, 24, [3]), (5, 20, []), (3, 10, []), (1, 4, [])],
)
def test_parts_of_a_share(share, minibatch, parts):
    assert parts_of(share, minibatch) == parts


@pytest.mark.parametrize(
    "num_samples, size, expected", [(8, 4, [4, 4]), (9, 4, [4, 4, 1]), (3, 4, [3]), (0, 4, [])]
)
def test_microbatch_sizes(num_samples, size, expected):
    assert microbatch_sizes(num_samples, size) == expected
