"""What data sets are accepted, and what a fingerprint tells of them."""

import random
from collections import UserDict

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, Subset, TensorDataset

from hybridpipe.data import samples
from hybridpipe.data.batches import Microbatches
from hybridpipe.data.samples import DRAWN_ANEW, comparable, drawn_anew
from hybridpipe.data.source import source_of

NUMBERS = TensorDataset(torch.arange(80.0).view(20, 4), torch.arange(20))


def fingerprint(name, dataset, seed, collate_fn=None) -> dict[str, str]:
    return samples.fingerprint(name, source_of(name, dataset, collate_fn), seed)


@pytest.mark.parametrize(
    "sample, told",
    [
        ({"image": torch.ones(2), "label": "cat"}, r"inputs\['label'\] of type str"),
        (
            (torch.ones(2), torch.ones(2), 1),
            r"3 parts; several inputs go into one tuple: \(\(a, b\), target\)",
        ),
        ((torch.ones(2), "cat"), "target of type str"),
        (("a text", 1), "inputs of type str"),
        (({"ids": "a text"}, 1), r"inputs\['ids'\] of type str"),
        ((torch.ones(2), None), "target of type NoneType"),
        (torch.ones(2), r"inputs alone; to predict, any target will do: \(inputs, 0\)"),
    ],
)
def test_samples_that_are_no_pairs_of_tensors_are_refused(sample, told):
    with pytest.raises(
        TypeError, match=rf"^data\[0\]: a sample must be a dict or a pair \(inputs, target\).* got {told}"
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


class Wrapping(IterableDataset):
    """Iterates anew over what can be read once."""

    def __init__(self, count: int) -> None:
        self.samples = iter([(torch.ones(1) * i, i) for i in range(count)])

    def __iter__(self):
        yield from self.samples


def test_a_wrapped_generator_is_told():
    with pytest.raises(
        ValueError, match=r"^data gives other samples each time it is iterated: let its __iter"
    ):
        fingerprint("data", Wrapping(8), seed=0)  # six, and then two
    assert drawn_anew(fingerprint("data", Wrapping(12), seed=0)) == {"inputs", "target"}


class Encoding(UserDict):
    """A dict that is none, as BatchEncoding of transformers."""


@pytest.mark.parametrize("kind", [dict, Encoding])
def test_a_dict_is_inputs_and_targets_at_once(kind):
    data = [kind(ids=torch.tensor([i, i]), label=i) for i in range(5)]
    inputs, targets = Microbatches(data, 4, 2)[0, 1]
    assert type(inputs) is dict and inputs["ids"].tolist() == [[2, 2], [3, 3]]
    assert targets["label"].tolist() == [2, 3]
    facts = fingerprint("data", data, seed=0)
    assert facts["inputs of data[0]"] == facts["target of data[0]"] != facts["inputs of data[4]"]


def test_dicts_with_other_keys_are_told():
    data = [{"ids": 1}, {"ids": 1, "mask": 0}]
    with pytest.raises(ValueError, match=r"same parts, got inputs\['mask'\] in one only of samples 0 and 1"):
        fingerprint("data", data, seed=0)


def padded(texts) -> dict[str, torch.Tensor]:
    """Pad to the longest of a microbatch."""
    longest = max(map(len, texts))
    return {"ids": torch.tensor([[*map(ord, text.ljust(longest))] for text in texts])}


TEXTS = ["a", "bb", "ccc", "dddd", "e"]


def test_a_collate_fn_makes_each_microbatch_for_itself():
    microbatches = Microbatches(source_of("data", TEXTS, padded), 4, 2)
    shapes = [microbatches[0, b][0]["ids"].shape for b in range(2)]
    assert shapes == [(2, 2), (2, 4)] and microbatches[1, 0][1]["ids"].tolist() == [[ord("e")]]
    assert len(fingerprint("data", TEXTS, seed=0, collate_fn=padded)) > 2


def test_draws_of_a_collate_fn_follow_from_seed_epoch_and_first_sample():
    def noisy(some):
        return torch.rand(len(some)), torch.tensor([random.random() for _ in some])

    def of(epoch, b):
        inputs, targets = Microbatches(source_of("data", TEXTS, noisy), 4, 2, seed=1, epoch=epoch)[0, b]
        return (*inputs.tolist(), *targets.tolist())

    assert of(0, 0) == of(0, 0) and len({of(0, 0), of(0, 1), of(1, 0)}) == 3


@pytest.mark.parametrize(
    "made, error, told",
    [
        (torch.ones(2), TypeError, r"collate_fn must return a pair .* got Tensor"),
        ((torch.ones(1), torch.ones(1)), ValueError, "as many samples as it gets, 2, got 1"),
        (
            {"x": torch.ones(2), "mask": torch.ones(5, 5)},
            ValueError,
            r"got 2 in .*\['x'\] and 5 in .*\['mask'\]",
        ),
        ({"x": torch.ones(2), "text": "a"}, TypeError, r"got str as inputs\['text'\]"),
    ],
)
def test_what_a_collate_fn_may_not_return_is_told(made, error, told):
    with pytest.raises(error, match=told):
        Microbatches(source_of("data", TEXTS, lambda _: made), 4, 2)[0, 0]
