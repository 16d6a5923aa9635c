"""Numbers made later are bit for bit those made at once, whichever of them are wanted."""

import numpy as np
import pytest
import torch
from torch import Tensor

from hybridpipe.model.deferred_init.tape import CannotDefer, Tape


def noted(make) -> tuple[Tape, dict]:
    torch.manual_seed(1)
    tape = Tape()
    with tape:
        made = make()
    return tape, {name: tape.ref(tensor) for name, tensor in made.items()}


def several() -> dict[str, Tensor]:
    first = torch.empty(4, 3).uniform_(-1, 1)
    second = torch.randn(5, 4) * 0.5
    view = second[1:3].t()
    view.mul_(2)
    first[0].fill_(7)
    third = torch.empty(3, 2, memory_format=torch.contiguous_format).normal_().t()
    torch.manual_seed(9)
    return {
        "first": first,
        "second": second,
        "view": view,
        "third": third,
        "last": torch.rand(2) + third.sum(),
    }


@pytest.mark.parametrize("wanted", [["first"], ["second", "view"], ["third"], ["last"], [*several()]])
def test_any_part_is_as_made_at_once(wanted):
    torch.manual_seed(1)
    at_once = several()
    tape, refs = noted(several)
    made = tape.numbers({name: refs[name] for name in wanted})
    assert all(torch.equal(made[name], at_once[name]) for name in wanted)
    assert all(made[name].stride() == at_once[name].stride() for name in wanted)


def test_a_view_still_shares_its_memory():
    tape, refs = noted(several)
    made = tape.numbers(refs)
    made["second"][1, 0] = 42.0
    assert made["view"][0, 0] == 42.0


def test_the_random_state_stays_as_it_was():
    tape, refs = noted(several)
    before = torch.get_rng_state()
    tape.numbers(refs)
    assert torch.equal(torch.get_rng_state(), before)


def test_what_draws_nothing_makes_no_draws(monkeypatch):
    """A table of positions is made without drawing the weights before it."""
    tape, refs = noted(lambda: {"weights": torch.randn(100), "positions": torch.arange(4) * 2})
    drawn = []
    monkeypatch.setattr(torch, "set_rng_state", drawn.append)
    assert tape.numbers({"positions": refs["positions"]})["positions"].tolist() == [0, 2, 4, 6]
    assert len(drawn) == 1  # the one that puts the state back


def test_numbers_that_python_reads_are_those_it_would_read():
    torch.manual_seed(1)
    read = torch.rand(3).max().item()
    found = []
    noted(lambda: found.append(torch.rand(3).max().item()) or {})
    assert found == [read]


def test_what_was_there_is_copied():
    table = np.ones(3, dtype=np.float32)

    def make() -> dict[str, Tensor]:
        return {"copy": torch.empty(3).copy_(torch.from_numpy(table))}

    tape, refs = noted(make)
    table[:] = 2
    assert tape.numbers(refs)["copy"].tolist() == [1, 1, 1]


def refilled() -> dict[str, Tensor]:
    table = np.ones(3, dtype=np.float32)
    given = torch.from_numpy(table)
    one = torch.empty(3).copy_(given)
    table[:] = 2
    return {"one": one, "other": torch.empty(3).copy_(given)}


def changed() -> dict[str, Tensor]:
    given = torch.from_numpy(np.ones(3, dtype=np.float32))
    return {"given": given.mul_(2)}


def drawn_elsewhere() -> dict[str, Tensor]:
    return {"drawn": torch.empty(3).normal_(generator=torch.Generator().manual_seed(1))}


@pytest.mark.parametrize(
    "make, why", [(refilled, "while it is made"), (changed, "there before"), (drawn_elsewhere, "of its own")]
)
def test_what_would_be_played_otherwise_is_refused(make, why):
    with pytest.raises(CannotDefer, match=why):
        noted(make)


def test_tapes_of_the_same_calls_have_one_digest():
    assert noted(several)[0].digest() == noted(several)[0].digest()
    assert noted(several)[0].digest() != noted(lambda: {"one": torch.randn(3)})[0].digest()


def test_states_of_another_tape_give_its_numbers():
    """So the ranks take rank 0's."""
    tape, refs = noted(lambda: {"one": torch.randn(3)})
    torch.manual_seed(5)
    other = Tape()
    with other:
        place = other.ref(torch.randn(3))
    other.states = tape.states
    assert torch.equal(other.numbers({"one": place})["one"], tape.numbers(refs)["one"])
