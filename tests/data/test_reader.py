"""A data set that is iterated: its minibatches, its end, and where it goes on."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

from hybridpipe.data.reader import KEPT, Begin, Reader, first_minibatch
from hybridpipe.data.samples import fingerprint
from hybridpipe.data.source import Source
from hybridpipe.errors import UserError


class Stream(IterableDataset):
    """Samples (n, draws), of which it counts those it has read."""

    def __init__(self, length):
        self.length, self.read = length, 0

    def __iter__(self):
        for n in range(self.length):
            self.read += 1
            yield torch.tensor([n]), torch.tensor([torch.rand(()), random.random(), np.random.random()])


class Stateful(Stream):
    """Goes on where its state says."""

    at = 0

    def __iter__(self):
        while self.at < self.length:
            self.at += 1
            self.read += 1
            yield torch.tensor([self.at - 1]), torch.tensor([torch.rand(())])
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def numbers(reader) -> list[list[list[int]]]:
    """The samples of each microbatch of each minibatch."""
    return [
        [batch.inputs(m).flatten().tolist() for m in range(len(batch.sizes))]
        for batch in reader.minibatches()
    ]


def draws(reader) -> list[float]:
    return [
        draw
        for batch in reader.minibatches()
        for m in range(len(batch.sizes))
        for draw in batch.targets(m).flatten().tolist()
    ]


def test_an_epoch_ends_where_the_data_set_does():
    reader = Reader(Source(Stream(7)), 4, 2)
    assert numbers(reader) == [[[0, 1], [2, 3]], [[4, 5], [6]]] and reader.num_samples == 7
    full = Reader(Source(Stream(8)), 4, 2)
    assert len(numbers(full)) == 2 and full.num_samples == 8
    dropped = Reader(Source(Stream(7), drop_last=True), 4, 2)
    assert len(numbers(dropped)) == 1 and dropped.num_samples == 4


def test_the_end_is_known_with_the_last_minibatch():
    for length in (7, 8):
        reader = Reader(Source(Stream(length)), 4, 2)
        assert [reader.num_samples for _ in reader.minibatches()] == [None, length]


def test_draws_follow_from_seed_and_epoch_and_leave_the_process_alone():
    state = torch.get_rng_state()
    first = draws(Reader(Source(Stream(7)), 4, 2, seed=1, epoch=2))
    random.random(), np.random.random()
    assert torch.equal(torch.get_rng_state(), state)
    assert draws(Reader(Source(Stream(7)), 4, 3, seed=1, epoch=2)) == first
    assert not set(first) & set(draws(Reader(Source(Stream(7)), 4, 2, seed=1, epoch=3)))


@pytest.mark.parametrize("kind, read", [(Stream, 10), (Stateful, 4)])
def test_it_goes_on_where_it_was_left(kind, read):
    whole, dataset = kind(10), kind(10)
    reader, expected, states = Reader(Source(whole), 3, 3), [], {}
    for batch in reader.minibatches():
        expected.append((batch.inputs(0).tolist(), batch.targets(0).tolist()))
        states |= reader.states
    rest = Reader(Source(dataset), 3, 3, begin=Begin(2, states.get(2)))
    found = [(batch.inputs(0).tolist(), batch.targets(0).tolist()) for batch in rest.minibatches()]
    assert found == expected[2:] and rest.num_samples == 10
    assert dataset.read == read  # with a state, earlier samples are not read again
    assert set(reader.states) == ({2, 3, 4, 1} if kind is Stateful else set())


class Rewinding(Stateful):
    """Begins wherever its last state says, each time, as data sets of Hugging Face do."""

    start = 0

    def __iter__(self):
        for n in range(self.start, self.length):
            self.at = n + 1
            yield torch.tensor([n]), torch.tensor([torch.rand(())])

    def load_state_dict(self, state):
        self.start = state["at"]


@pytest.mark.parametrize("kind", [Stateful, Rewinding])
def test_an_epoch_without_a_state_begins_as_if_nothing_was_read(kind):
    dataset = kind(8)
    whole = numbers(Reader(Source(dataset), 4, 4))
    first_minibatch(Source(dataset), 4, 4)
    fingerprints = [fingerprint("data", Source(dataset), seed=0)]
    rest = Reader(Source(dataset), 4, 4, begin=Begin(1, {"at": 4}))
    assert numbers(rest) == whole[1:] == [[[4, 5, 6, 7]]]
    fingerprints.append(fingerprint("data", Source(dataset), seed=0))
    assert fingerprints[0] == fingerprints[1]
    ended = Reader(Source(dataset), 4, 4, begin=Begin(2, rest.states[2], is_end=True))
    assert numbers(ended) == [] and numbers(Reader(Source(dataset), 4, 4, epoch=1)) == whole


def test_an_epoch_without_a_minibatch_is_refused():
    told = "the data set holds fewer samples than a minibatch, 4, and drop_last drops them"
    with pytest.raises(UserError, match=told):
        first_minibatch(Source(Stream(3), drop_last=True), 4, 4)
    with pytest.raises(UserError, match="an epoch must hold at least one sample"):
        numbers(Reader(Source(Stream(0)), 4, 4))
    with pytest.raises(UserError, match="ends before minibatch 3 of the epoch, where the training goes on"):
        numbers(Reader(Source(Stream(8)), 4, 4, begin=Begin(2)))


def test_few_states_are_kept():
    reader = Reader(Source(Stateful(20)), 2, 2)
    assert len(list(reader.minibatches())) == 10 and set(reader.states) == set(range(11 - KEPT, 11))


def test_a_state_that_no_checkpoint_can_hold_is_told_before_anything_is_trained():
    class WithTensor(Stateful):
        def state_dict(self):
            return {"at": self.at, "generator": torch.get_rng_state()}

    with pytest.raises(UserError, match=r"state_dict\(\) of the data set\.generator: .* got a tensor; use"):
        next(Reader(Source(WithTensor(4)), 2, 2).minibatches())


def test_a_rank_that_reads_nothing_is_told_the_sizes():
    counts, dataset = iter([4, 3]), Stream(7)
    reader = Reader(Source(dataset), 4, 2, agree=lambda own: next(counts), reads=False)
    assert [batch.sizes for batch in reader.minibatches()] == [[2, 2], [2, 1]]
    assert reader.num_samples == 7 and dataset.read == 0


def test_a_collate_fn_gets_the_samples_of_a_microbatch():
    source = Source(Stream(5), lambda some: {"n": torch.cat([n for n, _ in some])})
    batch = first_minibatch(source, 4, 3)
    assert [batch.inputs(m)["n"].tolist() for m in range(2)] == [[0, 1, 2], [3]]


def test_a_data_set_is_told_the_epoch():
    class Told(Stream):
        def set_epoch(self, epoch):
            self.length = epoch

    assert numbers(Reader(Source(Told(1)), 4, 4, epoch=3)) == [[[0, 1, 2]]]
