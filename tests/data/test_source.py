"""What a data set or a DataLoader says, and what of it is refused."""

import random
import re
from dataclasses import replace
from itertools import count as counted

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from hybridpipe.data.samples import fingerprint
from hybridpipe.data.source import source_of
from hybridpipe.errors import UserError

NUMBERS = TensorDataset(torch.arange(80.0).view(20, 4), torch.arange(20))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(NUMBERS)


class Reiterable:
    def __iter__(self):
        return iter(NUMBERS)


class ReadOnce(IterableDataset):
    def __init__(self):
        self.samples = iter(NUMBERS)

    def __iter__(self):
        return self.samples


class Saves(Stream):
    def state_dict(self):
        return {}


class Endless:
    """A sampler that says how many of its indices are an epoch."""

    def __iter__(self):
        return counted()

    def __len__(self):
        return 20


class WithoutLength:
    def __iter__(self):
        return counted()


class Doubling(DataLoader):
    def __iter__(self):
        return (2 * inputs for inputs, _ in super().__iter__())


def seeded_generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def loader(dataset=NUMBERS, **options) -> DataLoader:
    return DataLoader(dataset, **({"batch_size": 8} | options))


@pytest.mark.parametrize(
    "dataset, told",
    [
        ((pair for pair in NUMBERS), "the generator, which can be read once: wrap it in an IterableDataset"),
        (ReadOnce(), r"the ReadOnce, which can be read once: .* whose __iter__ begins anew each time"),
        ({"train": NUMBERS}, "got dict"),
        ("digits", "got str"),
        (3, "got int"),
    ],
)
def test_what_is_no_data_set_is_refused(dataset, told):
    with pytest.raises(TypeError, match=f"^dataset must be a data set with len.*{told}"):
        source_of("dataset", dataset)


def test_an_empty_data_set_is_refused():
    with pytest.raises(ValueError, match="dataset must hold at least one sample, got none"):
        source_of("dataset", [])


def test_half_a_state_protocol_is_refused():
    with pytest.raises(TypeError, match="dataset has only one of state_dict and load_state_dict"):
        source_of("dataset", Saves())


@pytest.mark.parametrize(
    "dataset, is_iterable", [(NUMBERS, False), ([1], False), (Stream(), True), (Reiterable(), True)]
)
def test_a_data_set_has_an_index_or_is_iterated(dataset, is_iterable):
    source = source_of("dataset", dataset)
    assert source.is_iterable == is_iterable and source_of("dataset", source) is source
    assert source.num_samples(4) == (None if is_iterable else len(dataset))


def test_a_loaders_settings_are_taken_over():
    def collate(samples):
        return samples

    source = source_of("dataset", loader(collate_fn=collate, num_workers=2, drop_last=True), None, 8)
    assert source.dataset is NUMBERS and source.collate_fn is collate
    assert source.num_workers == 2 and source.num_samples(8) == 16
    assert source.order(8, seed=0, epoch=0, shuffle=False) == list(range(16))
    plain = source_of("dataset", loader(), None, 8)
    assert plain.collate_fn is None and plain.num_workers is None and plain.num_samples(8) == 20
    assert source_of("dataset", loader(), collate).collate_fn is collate


@pytest.mark.parametrize(
    "sampler, shuffle",
    [(None, False), (SequentialSampler(NUMBERS), False), (RandomSampler(NUMBERS), True)],
)
def test_a_loader_shuffles_or_not(sampler, shuffle):
    assert source_of("dataset", loader(sampler=sampler)).shuffle == shuffle
    assert source_of("dataset", loader(shuffle=True)).shuffle


class Halves:
    """Half of the samples, another half in each epoch."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 10

    def __iter__(self):
        some = list(range(self.epoch % 2, 20, 2))
        random.shuffle(some)
        return iter(some)


@pytest.mark.parametrize(
    "sampler, count",
    [
        (SubsetRandomSampler(range(5)), 5),
        (WeightedRandomSampler(torch.ones(20), 30), 30),
        (RandomSampler(NUMBERS, num_samples=7), 7),
        (RandomSampler(NUMBERS, replacement=True), 20),
        (Halves(), 10),
    ],
)
def test_a_samplers_order_follows_from_seed_and_epoch(sampler, count):
    source = source_of("dataset", loader(sampler=sampler))
    assert source.num_samples(8) == count

    def order(seed=1, epoch=0):
        return source.order(8, seed, epoch, shuffle=False)

    state = torch.get_rng_state()
    assert order() == order() and len(order()) == count
    assert len({tuple(each) for each in (order(), order(seed=2), order(epoch=1))}) == 3
    assert torch.equal(torch.get_rng_state(), state)
    assert "order of dataset" in fingerprint("dataset", source, seed=0)


def test_of_a_sampler_without_end_as_many_indices_are_taken_as_it_says():
    assert source_of("dataset", loader(sampler=Endless())).order(8, 0, 0, shuffle=False) == [*range(20)]


@pytest.mark.parametrize("dataset", [NUMBERS, torch.arange(7)])
def test_an_epoch_without_samples_is_refused(dataset):
    with pytest.raises(
        ValueError, match="holds fewer samples than a minibatch, 32, and drop_last drops them"
    ):
        source_of("dataset", loader(dataset, drop_last=True)).order(32, 0, 0, shuffle=False)
    with pytest.raises(ValueError, match="must hold at least one sample, and the data set, or its sampler"):
        source_of("dataset", loader(dataset, sampler=[])).order(8, 0, 0, shuffle=False)


def test_a_sampler_that_draws_from_its_own_generator_is_refused():
    class Own(Halves):
        generators = random.Random(0)

        def __iter__(self):
            return iter(self.generators.sample(range(20), 10))

    own = Own()
    with pytest.raises(ValueError, match="its sampler gives another order each time"):
        fingerprint("dataset", source_of("dataset", loader(sampler=own)), seed=0)


@pytest.mark.parametrize("given", [(0, 3), [1, 2], "a", 1.5])
def test_a_sampler_that_gives_no_indices_is_refused(given):
    """It ended in int() of a tuple."""
    source = source_of("dataset", loader(sampler=[0, given]))
    told = f"must give indices of samples, integers, got {re.escape(repr(given))}"
    with pytest.raises(UserError, match=told):
        fingerprint("dataset", source, seed=0)


def test_a_loader_of_held_out_data_may_collate_in_its_own_way():
    assert source_of("validation", loader(collate_fn=list), collate_fn=tuple).collate_fn is list


@pytest.mark.parametrize(
    "given, told",
    [
        (loader(batch_size=4), "with batch_size = 4, and minibatch_size = 8: make them equal"),
        (loader(batch_size=None), "that makes batches of its own"),
        (
            DataLoader(NUMBERS, batch_sampler=BatchSampler(SequentialSampler(NUMBERS), 8, False)),
            "that makes batches of its own",
        ),
        (loader(sampler=DistributedSampler(NUMBERS, 2, 0)), "with a DistributedSampler: every rank passes"),
        (
            loader(shuffle=True, generator=seeded_generator()),
            r"with a generator: .* follow from the Trainer's",
        ),
        (loader(sampler=RandomSampler(NUMBERS, generator=seeded_generator())), "with a generator: the order"),
        (loader(sampler=WithoutLength()), r"with a sampler without len\(\): give it a method __len__"),
        (Doubling(NUMBERS, 8), "that overrides __iter__, which would not be called"),
        (loader(worker_init_fn=print, num_workers=1), "with worker_init_fn, which would not be called"),
        (loader(collate_fn=list), "with a collate_fn of its own, and the Trainer has another"),
        (loader(multiprocessing_context="spawn", num_workers=1), "with a multiprocessing_context"),
    ],
)
def test_what_cannot_be_followed_is_refused(given, told):
    with pytest.raises(UserError, match=f"^dataset is a DataLoader {told}"):
        source_of("dataset", given, collate_fn=tuple, minibatch_size=8)


def test_processes_do_not_load_an_iterable_data_set():
    with pytest.raises(ValueError, match=r"is an IterableDataset, .* leave num_workers = 2 out"):
        source_of("dataset", loader(Stream(), num_workers=2))


@pytest.mark.parametrize("shuffle", [False, True])
def test_groups_take_their_parts_of_each_minibatch(shuffle):
    """Together they have the samples that one group would have, minibatch by minibatch, but for the rest."""
    whole = source_of("dataset", NUMBERS)
    shares = [replace(whole, group=(index, 3)) for index in range(3)]
    order = whole.order(9, 0, 0, shuffle)
    dealt = [share.order(3, 0, 0, shuffle) for share in shares]
    assert [len(each) for each in dealt] == [share.num_samples(3) for share in shares] == [6, 6, 6]
    for i in range(2):  # the last two of twenty samples do not divide
        together = [sample for each in dealt for sample in each[3 * i : 3 * i + 3]]
        assert together == order[9 * i : 9 * i + 9]


def test_a_short_minibatch_is_dealt_as_well():
    share = replace(source_of("dataset", NUMBERS), group=(1, 2))
    assert share.order(8, 0, 0, False) == [*range(8, 16), 18, 19]
    assert replace(share, drop_last=True).order(8, 0, 0, False) == [*range(8, 16)]
