"""What replicas have written is joined for whoever updates it now."""

import pytest
import torch

from hybridpipe.checkpoint.joined_state import JoinedState, Wanted
from hybridpipe.errors import UserError
from hybridpipe.stage.state import OfParameter

SHAPE = torch.Size([3, 4])
WHOLE = torch.arange(12.0).view(SHAPE)


def piece(start: int, stop: int) -> OfParameter:
    state = {"step": torch.tensor(2.0), "sum": WHOLE.view(-1)[start:stop].clone()}
    return OfParameter({"lr": 0.1}, state, part=range(start, stop))


def whole() -> OfParameter:
    return OfParameter({"lr": 0.1}, {"step": torch.tensor(2.0), "sum": WHOLE.clone()})


@pytest.mark.parametrize("ranges", [{}, {"w": range(2, 9)}], ids=["all", "a part"])
@pytest.mark.parametrize("files", [[whole()], [piece(0, 5), piece(5, 12)], [piece(8, 12), piece(0, 8)]])
def test_state_of_any_replicas_becomes_what_is_wanted(files, ranges):
    joined = JoinedState({"w": Wanted(SHAPE, part=ranges.get("w"))})
    for found in files:
        assert not joined.is_complete
        assert joined.add({"w": found, "of another rank": whole()})
    assert joined.is_complete
    own = joined.joined("here")["w"]
    expected = WHOLE.view(-1)[2:9] if ranges else WHOLE
    assert torch.equal(own.state["sum"], expected) and own.part == ranges.get("w")
    assert own.state["step"] == 2 and own.options == {"lr": 0.1}


def test_one_file_is_enough_for_its_part():
    joined = JoinedState({"w": Wanted(SHAPE, part=range(5)), "v": Wanted(SHAPE, part=range(6, 12))})
    assert not joined.add({"u": whole()})
    joined.add({"w": piece(0, 5), "v": piece(6, 12)})
    assert joined.is_complete


def test_parts_that_another_rank_updates_are_not_kept():
    joined = JoinedState({"w": Wanted(SHAPE, part=range(5))})
    assert joined.add({"w": piece(5, 12)}), "the file has the parameter"
    assert joined.joined("here") == {} and not joined.is_complete


def test_a_missing_part_is_refused():
    joined = JoinedState({"w": Wanted(SHAPE)})
    joined.add({"w": piece(0, 5)})
    with pytest.raises(UserError, match=r"^here: lacks optimizer state of 7 elements of w$"):
        joined.joined("here")


def test_parts_that_do_not_belong_together_are_refused():
    joined = JoinedState({"w": Wanted(SHAPE)})
    joined.add({"w": piece(0, 5)})
    joined.add({"w": OfParameter({"lr": 0.1}, {"step": torch.tensor(2.0)}, part=range(5, 12))})
    with pytest.raises(UserError, match=r"^here: optimizer state of w cannot be joined: KeyError\('sum'\)$"):
        joined.joined("here")


def test_a_parameter_in_no_file_is_left_to_the_check():
    joined = JoinedState({"w": Wanted(SHAPE)})
    joined.add({})
    assert joined.joined("here") == {}
