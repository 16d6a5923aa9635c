"""State that is cut and joined again is the same state."""

from itertools import pairwise

import pytest
import torch

from hybridpipe.model.held_part import HeldPart, common_elements
from hybridpipe.stage.parts import Piece, common, is_part_of, join, lacking

SHAPE = torch.Size([4, 6])


def whole():
    return {
        "step": torch.tensor(3.0),
        "exp_avg": torch.arange(24.0).reshape(SHAPE),
        "history": [torch.arange(24.0).reshape(SHAPE) * i for i in (1, 2)],
        "pair": (torch.ones(SHAPE), "text"),
        "beta": 0.9,
    }


def cut(part: range):
    return Piece(join([Piece(whole())], SHAPE, part), part)


def test_a_part_has_its_elements_and_what_belongs_to_the_parameter():
    state = cut(range(5, 9)).state
    assert state["exp_avg"].tolist() == [5.0, 6.0, 7.0, 8.0]
    assert state["history"][1].tolist() == [10.0, 12.0, 14.0, 16.0]
    assert state["step"] == 3 and state["beta"] == 0.9 and state["pair"][1] == "text"


@pytest.mark.parametrize("edges", [(0, 24), (0, 7, 24), (0, 1, 2, 16, 24)])
def test_parts_make_the_whole_again_in_any_order(edges):
    parts = [cut(range(a, b)) for a, b in pairwise(edges)]
    for pieces in (parts, parts[::-1]):
        again = join(pieces, SHAPE)
        assert again["exp_avg"].shape == SHAPE and torch.equal(again["exp_avg"], whole()["exp_avg"])
        assert torch.equal(again["history"][1], whole()["history"][1])
        assert isinstance(again["pair"], tuple) and torch.equal(again["pair"][0], torch.ones(SHAPE))
        assert again["step"].shape == ()


def test_other_parts_are_made_of_parts():
    pieces = [cut(range(10)), cut(range(10, 24))]
    assert join(pieces, SHAPE, range(8, 12))["exp_avg"].tolist() == [8.0, 9.0, 10.0, 11.0]
    assert join(pieces[:1], SHAPE, range(2, 3))["exp_avg"].tolist() == [2.0]


def test_a_count_is_no_element_though_a_part_has_one():
    state = {"step": torch.tensor([3.0]), "sum": torch.arange(17.0)}
    pieces = [
        Piece({"step": state["step"], "sum": state["sum"][:16]}, range(16)),
        Piece({"step": state["step"], "sum": state["sum"][16:]}, range(16, 17)),
    ]
    for each in (pieces, pieces[::-1]):
        again = join(each, torch.Size([17]))
        assert torch.equal(again["sum"], state["sum"]) and torch.equal(again["step"], state["step"])


def test_missing_elements_are_refused():
    with pytest.raises(LookupError, match=r"^14 elements are missing$"):
        join([cut(range(10))], SHAPE)


def test_a_cut_keeps_no_more_memory_than_it_needs():
    kept = join([Piece(whole())], SHAPE, range(4))["exp_avg"]
    assert kept.untyped_storage().nbytes() == 16
    given = whole()["exp_avg"]
    copied = join([Piece({"exp_avg": given})], SHAPE, copies=True)["exp_avg"]
    assert torch.equal(copied, given) and copied.data_ptr() != given.data_ptr()


@pytest.mark.parametrize(
    "one, other, both", [((0, 4), (2, 6), 2), ((0, 4), (4, 6), 0), ((5, 9), (0, 2), 0), ((1, 2), (0, 9), 1)]
)
def test_common_elements(one, other, both):
    assert len(common(range(*one), range(*other))) == len(common(range(*other), range(*one))) == both


ROWS, COLUMNS = ([HeldPart(SHAPE, "shard", i, 2, dim) for i in range(2)] for dim in (0, 1))
THIRDS = [HeldPart(SHAPE, "shard", i, 3, dim=1) for i in range(3)]
PACKED = [HeldPart(SHAPE, "shard", i, 2, packs=2) for i in range(2)]
WAYS = {"whole": [None], "rows": ROWS, "columns": COLUMNS, "thirds": THIRDS, "packed": PACKED}


def state_of(held: HeldPart | None):
    own = whole()
    sliced = (lambda tensor: tensor) if held is None else held.of
    return own | {
        "exp_avg": sliced(own["exp_avg"]),
        "history": [sliced(each) for each in own["history"]],
        "pair": (sliced(own["pair"][0]), "text"),
    }


def pieces_of(way: str, sharded: bool = False) -> list[Piece]:
    """What ranks have; where an update is sharded, in two unequal ranges of what is held."""
    found = []
    for held in WAYS[way]:
        one, shape = Piece(state_of(held), held=held), SHAPE if held is None else held.shape
        ends = range(0) if not sharded else (0, 3, shape.numel())
        parts = [range(a, b) for a, b in pairwise(ends)] or [None]
        found += [Piece(join([one], SHAPE, part, held), part, held) for part in parts]
    return found


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("now", WAYS)
@pytest.mark.parametrize("before", WAYS)
def test_what_ranks_hold_in_one_way_they_hold_in_any_other(before, now, sharded):
    pieces = pieces_of(before, sharded)
    for held in WAYS[now]:
        expected = state_of(held)
        for mixed in (pieces, pieces[::-1]):
            again = join(mixed, SHAPE, held=held)
            assert torch.equal(again["exp_avg"], expected["exp_avg"])
            assert torch.equal(again["history"][1], expected["history"][1])
            assert again["pair"][1] == "text" and again["step"] == 3
        own = join(pieces, SHAPE, range(1, 4), held)
        assert torch.equal(own["exp_avg"], expected["exp_avg"].reshape(-1)[1:4])


@pytest.mark.parametrize("now", WAYS)
@pytest.mark.parametrize("before", WAYS)
def test_of_what_ranks_hold_no_more_is_needed_than_is_wanted(before, now):
    for held in WAYS[now]:
        elements = torch.arange(24).view(SHAPE)
        mine = set((elements if held is None else held.of(elements)).flatten().tolist())
        needed = []
        for piece in pieces_of(before):
            there = set((elements if piece.held is None else piece.held.of(elements)).flatten().tolist())
            assert common_elements(piece.held, held, SHAPE) == len(mine & there)
            assert is_part_of(piece, SHAPE, held=held) == bool(mine & there)
            needed += [piece] * bool(mine & there)
        assert lacking(needed, SHAPE, held=held) == 0
        assert lacking(needed[1:], SHAPE, held=held) > 0
        with pytest.raises(LookupError):
            join(needed[1:], SHAPE, held=held)


@pytest.mark.parametrize("way", WAYS)
def test_what_two_stages_wrote_counts_once(way):
    """A tied weight was in the files of both, and could not be joined."""
    pieces = pieces_of(way)
    assert lacking([*pieces, *pieces], SHAPE) == 0
    assert torch.equal(join([*pieces, *pieces], SHAPE)["exp_avg"], whole()["exp_avg"])
    assert lacking([pieces[0]] * 2, SHAPE) == 24 - 24 // len(pieces)
