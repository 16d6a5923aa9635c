"""Every element belongs to one replica, and parts begin where a vectorised kernel may divide."""

import random

import pytest

from hybridpipe.optim.layout import UNIT, ShardLayout, padded


def test_two_parameters_on_two_replicas():
    layout = ShardLayout([40, 5], 2)
    assert layout.offsets == (0, 48) and layout.share == 32 and layout.size == 64
    assert [layout.part(0, r) for r in (0, 1)] == [range(32), range(32, 40)]
    assert [len(layout.part(1, r)) for r in (0, 1)] == [0, 5]


@pytest.mark.parametrize("seed", range(50))
def test_every_element_belongs_to_one_replica(seed):
    draw = random.Random(seed)
    counts, replicas = [draw.randint(1, 300) for _ in range(draw.randint(1, 12))], draw.randint(1, 7)
    layout = ShardLayout(counts, replicas)
    for i, count in enumerate(counts):
        parts = [layout.part(i, replica) for replica in range(replicas)]
        assert [element for part in parts for element in part] == list(range(count))
        assert all(part.start % UNIT == 0 for part in parts if part)


@pytest.mark.parametrize("seed", range(50))
def test_parameters_that_are_dealt_whole_lie_apart_in_one_share_each(seed):
    draw = random.Random(seed)
    counts, replicas = [draw.randint(1, 300) for _ in range(draw.randint(1, 12))], draw.randint(1, 7)
    layout = ShardLayout(counts, replicas, [0] * replicas)
    for i, count in enumerate(counts):
        (part,) = [part for replica in range(replicas) if (part := layout.part(i, replica))]
        assert part == range(count)
    places = sorted((at, at + padded(count)) for at, count in zip(layout.offsets, counts, strict=True))
    ends = [0, *(end for _, end in places)]
    assert all(begin >= end for (begin, _), end in zip(places, ends, strict=False))
    assert places[-1][1] <= layout.size
    assert layout.share <= padded(-(-sum(map(padded, counts)) // replicas)) + padded(max(counts))


def test_who_holds_least_gets_the_first():
    layout = ShardLayout([64, 64, 32], 3, [100, 0, 50])
    assert [layout.held(r) for r in range(3)] == [32, 64, 64] and layout.share == 64


@pytest.mark.parametrize("replicas", [2, 3, 8])
def test_shares_are_equal_but_for_the_padding(replicas):
    counts = [1000, 3, 70_001, 64, 12_345]
    layout = ShardLayout(counts, replicas)
    held = [sum(len(layout.part(i, r)) for i in range(len(counts))) for r in range(replicas)]
    assert max(held) <= layout.share
    assert max(held) <= 1.01 * sum(counts) / replicas


def test_the_buffer_holds_all_parameters_and_little_more():
    layout = ShardLayout([17, 16, 1], 3)
    assert layout.offsets == (0, 32, 48)
    assert 64 <= layout.size <= 64 + 3 * padded(1)
