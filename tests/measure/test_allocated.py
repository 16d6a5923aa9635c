"""The most bytes that torch has at a time, in a block."""

import pytest
import torch

from hybridpipe.measure.allocated import allocated

CPU = torch.device("cpu")


def test_what_is_there_at_a_time_and_what_stays():
    with allocated(CPU) as seen:
        first = torch.ones(1000)
        second = torch.ones(500)
        del second
        torch.ones(250)
    assert (seen.most, seen.kept, seen.passing) == (6000, 4000, 2000)
    del first


def test_what_a_kernel_needs_for_a_moment_counts():
    weight, images = torch.ones(64, 64, 3, 3), torch.ones(2, 64, 8, 8)
    with allocated(CPU) as seen:
        out = torch.conv2d(images, weight, padding=1)
    assert seen.kept == out.nbytes < seen.most


def test_what_was_there_before_and_is_freed_makes_room():
    with allocated(CPU):
        before = torch.ones(1000)
    with allocated(CPU) as seen:
        del before
        after = torch.ones(1100)
    assert (seen.most, seen.kept) == (400, 400)
    del after


@pytest.mark.filterwarnings("ignore")
def test_a_profiler_of_the_users_is_left_alone():
    with torch.autograd.profiler.profile(), allocated(CPU) as seen:
        torch.ones(1000)
    assert seen.most is None and seen.passing is None
