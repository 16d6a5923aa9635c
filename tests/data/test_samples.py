"""What data sets are accepted, and what a fingerprint tells of them."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

from hybridpipe.data.batches import Microbatches
from hybridpipe.data.samples import DRAWN_ANEW, check_dataset, comparable, drawn_anew, fingerprint

NUMBERS = TensorDataset(torch.arange(80.0).view(20, 4), torch.arange(20))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(NUMBERS)


@pytest.mark.parametrize(
    "dataset, told",
    [
        (DataLoader(NUMBERS), r"got a DataLoader: pass the data set inside it, dataset = loader.dataset"),
        (Stream(), "got the IterableDataset Stream"),
        ((pair for pair in NUMBERS), "with len\\(\\) and an index from 0, got generator"),
        ({"train": NUMBERS}, "got dict"),
        ("digits", "got str"),
    ],
)
def test_what_has_no_samples_by_number_is_refused(dataset, told):
    with pytest.raises(TypeError, match=f"^dataset must be a map-style data set.*{told}"):
        check_dataset("dataset", dataset)


@pytest.mark.parametrize(
    "sample, told",
    [
        ({"image": torch.ones(2), "label": 1}, "a dict with the keys image, label"),
        (
            (torch.ones(2), torch.ones(2), 1),
            r"3 parts; several inputs go into one tuple: \(\(a, b\), target\)",
        ),
        ((torch.ones(2), "cat"), "target of type str"),
        (("a text", 1), "inputs of type str"),
        (({"ids": "a text"}, 1), r"inputs\['ids'\] of type str"),
        ((torch.ones(2), None), "target of type NoneType"),
        (torch.ones(2), "a Tensor"),
    ],
)
def test_samples_that_are_no_pairs_of_tensors_are_refused(sample, told):
    with pytest.raises(
        TypeError, match=rf"^data\[0\]: a sample must be a pair \(inputs, target\).* got {told}"
    ):
        fingerprint("data", [sample] * 3, seed=0)


def test_ragged_samples_are_told_with_their_shapes():
    ragged = [(torch.ones(i), i) for i in range(2, 30)]
    told = r"must have one shape, got inputs of shape \(2,\) in sample 0 and \(\d+,\) in sample \d+; pad them"
    with pytest.raises(ValueError, match=told):
        fingerprint("data", ragged, seed=0)
    with pytest.raises(ValueError, match=r"\(4,\) in sample 2 and \(5,\) in sample 3; pad them"):
        Microbatches(ragged, 4, 2)[0, 1]


@pytest.mark.parametrize(
    "sample",
    [
        (torch.ones(2), 1),
        (np.ones(2), np.int64(3)),
        ((torch.ones(2, dtype=torch.bfloat16), np.ones(1)), (0.5, True)),
        [torch.ones(2), torch.eye(2)],
        ({"ids": torch.arange(3), "more": (1, [2.0])}, {"label": 1}),
    ],
)
def test_pairs_of_tensors_arrays_and_numbers_are_accepted(sample):
    fingerprint("data", [sample] * 3, seed=0)
    Microbatches([sample] * 3, 3, 3)[0, 0]


def test_a_fingerprint_tells_length_order_and_numbers():
    def of(dataset):
        return fingerprint("data", dataset, seed=3)

    first = of(NUMBERS)
    assert of(Subset(NUMBERS, range(20))) == first and first["len(data)"] == "20"
    turned = of(Subset(NUMBERS, [*range(1, 20), 0]))
    assert all(turned[name] != text for name, text in first.items() if name != "len(data)")
    assert of(Subset(NUMBERS, range(19))) != first
    one_off = NUMBERS.tensors[1].clone()
    one_off[19] = 0
    differs = of(TensorDataset(NUMBERS.tensors[0], one_off))
    assert {name for name in first if differs[name] != first[name]} == {"target of data[19]"}
    doubles = TensorDataset(NUMBERS.tensors[0].double(), NUMBERS.tensors[1])
    assert of(doubles)["inputs of data[0]"] != first["inputs of data[0]"]


class Noisy:
    """Draws from the generators that are keyed, and from one of its own."""

    def __init__(self, own: bool) -> None:
        self.generator, self.own = random.Random(), own

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index):
        noise = [random.random(), np.random.random(), torch.rand(()).item()]
        return torch.tensor([*noise, self.generator.random() * self.own]), index


def test_keyed_draws_are_the_same_on_every_rank_and_others_say_nothing():
    keyed = fingerprint("data", Noisy(False), seed=0)
    assert keyed == fingerprint("data", Noisy(False), seed=0) and not drawn_anew(keyed)
    own = fingerprint("data", Noisy(True), seed=0)
    assert own["inputs of data[0]"] == DRAWN_ANEW and drawn_anew(own) == {"inputs"}
    assert comparable(keyed, {"inputs"}) == comparable(own, {"inputs"})
