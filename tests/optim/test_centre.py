"""The centre of groups, in one process: a class adds up what several centres send, as the ranks would."""

import threading

import pytest
import torch

from hybridpipe.comm.group_sums import SumsOverGroups
from hybridpipe.comm.status import rank_status
from hybridpipe.config.options import GroupOptions
from hybridpipe.optim.centre import Centre


class Sums(SumsOverGroups):
    """Adds up what as many threads as there are groups give at once."""

    def __init__(self, meeting: "Meeting", index: int) -> None:
        super().__init__(len(meeting.given))
        self.meeting, self.index = meeting, index

    def _sum(self, tensor: torch.Tensor) -> None:
        self.meeting.given[self.index] = tensor.clone()
        self.meeting.barrier.wait()
        total = sum(self.meeting.given)
        self.meeting.barrier.wait()
        tensor.copy_(total)


class Meeting:
    def __init__(self, count: int) -> None:
        self.given: list = [None] * count
        self.barrier = threading.Barrier(count)


def together(weights: list[torch.Tensor], updates: int = 1, **options) -> list[Centre]:
    """Return the centres of groups with these weights, from 0, after updates that change nothing."""
    count, meeting = len(weights), Meeting(len(weights))
    chosen = GroupOptions(count=count, **{"every": 1, **options})
    parameters = [torch.nn.Parameter(torch.zeros_like(each)) for each in weights]
    centres = [Centre([p], chosen, Sums(meeting, i)) for i, p in enumerate(parameters)]
    for p, each in zip(parameters, weights, strict=True):
        p.data.copy_(each)

    def run(centre: Centre) -> None:
        for done in range(1, updates + 1):
            centre.after(done, 1)

    threads = [threading.Thread(target=run, args=(centre,)) for centre in centres]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rank_status.wait = None  # of several ranks in one process
    return centres


def weights_of(centre: Centre) -> torch.Tensor:
    (p,) = centre.kept()
    return p.detach()


def kept(centre: Centre) -> dict[str, torch.Tensor]:
    (found,) = centre.kept().values()
    return found


ONE, OTHER = torch.tensor([1.0, 2.0]), torch.tensor([3.0, -2.0])


def test_groups_take_the_mean():
    for centre in together([ONE, OTHER], rule="average"):
        assert weights_of(centre).tolist() == kept(centre)["centre"].tolist() == [2.0, 0.0]


def test_groups_and_centre_move_towards_each_other():
    first, second = together([ONE, OTHER], rule="elastic", moving_rate=0.25)
    assert weights_of(first).tolist() == [0.75, 1.5] and weights_of(second).tolist() == [2.25, -1.5]
    assert kept(first)["centre"].tolist() == kept(second)["centre"].tolist() == [1.0, 0.0]


def test_the_centre_takes_a_step_of_nesterovs_momentum():
    """Torch's SGD says the same of the mean difference."""
    reference = torch.nn.Parameter(torch.zeros(2))
    outer = torch.optim.SGD([reference], lr=0.7, momentum=0.9, nesterov=True)
    reference.grad = -(ONE + OTHER) / 2
    outer.step()
    for centre in together([ONE, OTHER], rule="diloco"):
        assert torch.allclose(weights_of(centre), reference.detach())


def test_nothing_is_exchanged_before_it_is_due():
    centre, _ = together([ONE, OTHER], rule="average", every=3, updates=2)
    assert weights_of(centre).tolist() == ONE.tolist() and kept(centre)["centre"].tolist() == [0.0, 0.0]
    centre, _ = together([ONE, OTHER], rule="average", every=3, updates=3)
    assert weights_of(centre).tolist() == [2.0, 0.0]


def test_what_travels_is_kept_and_used_when_it_is_due():
    options = {"every": 4, "delay": 2, "mixing": 0.5, "outer_lr": 1.0, "outer_momentum": 0.0}
    centre, _ = together([ONE, OTHER], updates=5, **options)
    travelling = kept(centre)
    assert travelling["travelling"].tolist() == [4.0, 0.0] and travelling["centre"].tolist() == [0.0, 0.0]
    with pytest.raises(KeyError):
        kept(together([ONE, OTHER], updates=6, **options)[0])["travelling"]
    p = next(iter(centre.kept()))
    centre.load({p: travelling})
    centre.after(6, 1)  # alone, as the sum has arrived
    assert weights_of(centre).tolist() == [(1.0 + 2.0) / 2, (2.0 + 0.0) / 2]


def test_the_centre_stands_in_for_the_weights():
    centre, _ = together([ONE, OTHER], rule="elastic", moving_rate=0.25)
    with centre.in_place():
        assert weights_of(centre).tolist() == [1.0, 0.0]
    assert weights_of(centre).tolist() == [0.75, 1.5]


def test_half_precision_has_a_centre_of_single():
    half = [each.to(torch.bfloat16) for each in (ONE, OTHER)]
    centre, _ = together(half, rule="elastic", moving_rate=0.001)
    assert kept(centre)["centre"].dtype == torch.float32 and kept(centre)["centre"].tolist() == [
        pytest.approx(0.004),
        0.0,
    ]


def test_complex_weights_meet_as_well():
    one, other = torch.tensor([1.0 + 2.0j]), torch.tensor([3.0 - 4.0j])
    centre, _ = together([one, other], rule="average")
    assert weights_of(centre).tolist() == [2.0 - 1.0j]


def test_fragments_are_exchanged_in_turn():
    options, sums = GroupOptions(count=1, every=4, fragments=2, rule="average"), Alone()
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    centre = Centre(parameters, options, sums)
    for number, p in enumerate(parameters):
        p.data.fill_(number + 1)
    for done in range(1, 9):
        centre.after(done, 1)
        for number, p in enumerate(parameters):
            p.data.add_(number + 1)
    assert sums.sent == [[2.0 + 2], [1.0 + 3], [2.0 * 4], [1.0 * 4]]  # after updates 2, 4, 6 and 8


class Alone(SumsOverGroups):
    """The sums of one group, with what it has sent."""

    def __init__(self) -> None:
        super().__init__(1)
        self.sent: list[list[float]] = []

    def _sum(self, tensor: torch.Tensor) -> None:
        self.sent.append(tensor.tolist())


def test_what_other_ranks_hold_as_well_is_in_the_first_fragment():
    """Stages that share a parameter have it in other places, and must exchange it at the same updates."""
    sums, options = Alone(), GroupOptions(count=1, every=2, fragments=2, rule="average")
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(3)]
    centre = Centre(parameters, options, sums, shared=parameters[2:])
    for number, p in enumerate(parameters, 1):
        p.data.fill_(number)
    centre.after(1, 1)
    centre.after(2, 1)
    assert sums.sent == [[2.0], [3.0, 1.0]]


def test_weights_are_the_centre_until_something_is_trained():
    """They may be loaded, or changed by hand, in the meantime."""
    p = torch.nn.Parameter(ONE.clone())
    centre = Centre([p], GroupOptions(count=1, every=2, rule="average"), Alone())
    p.data.copy_(OTHER)
    with centre.in_place():
        assert p.tolist() == OTHER.tolist()
    centre.begin()
    p.data.copy_(ONE)
    centre.after(1, 1)
    with centre.in_place():
        assert p.tolist() == OTHER.tolist()
    centre.reset()
    assert kept(centre)["centre"].tolist() == ONE.tolist()


def test_what_is_frozen_while_a_sum_travels_has_its_part_of_it():
    options = GroupOptions(count=1, every=2, delay=1, mixing=0.0, outer_lr=1.0, outer_momentum=0.0)
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    centre = Centre(parameters, options, Alone())
    for p, each in zip(parameters, (ONE, OTHER), strict=True):
        p.data.copy_(each)
    centre.after(1, 1)
    centre.after(2, 1)
    parameters[0].requires_grad_(False)
    centre.after(3, 1)
    assert [p.tolist() for p in parameters] == [ONE.tolist(), OTHER.tolist()]
