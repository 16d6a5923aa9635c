"""Microbatches that a rank loads, from the start of a training and after a resume."""

from functools import partial
from types import SimpleNamespace

import pytest

from hybridpipe.engine.worker import Worker
from hybridpipe.planning.plan import Place, Plan
from tests.planning.helpers import plan


def _loads(of: Plan, stage: int, training: bool) -> bool:
    return stage in (0, of.num_stages - 1)


def worker(of: Plan, place: Place) -> Worker:
    """Make a worker without communicators, which knows only what it loads."""
    made = Worker.__new__(Worker)
    made.plan, made.place = of, place
    stages = [SimpleNamespace(loads=partial(_loads, of, s)) for s in of.held_stages(place)]
    made.executor = SimpleNamespace(stages=stages)
    made._program, made._forward_program = made._make_program, made._make_forward_program
    return made


def of_all_replicas(of: Plan, stage: int, *arguments) -> list[tuple[int, int]]:
    places = [Place(stage, replica) for replica in range(of.replicas[stage])]
    return sorted(each for place in places for each in worker(of, place).loads(*arguments))


@pytest.mark.parametrize("begin", [0, 1, 2])
def test_a_minibatch_is_loaded_once_in_front_and_once_behind(begin):
    of, sizes = plan([2, 1, 3], 4), [4, 4, 2]
    expected = [(i, m) for i in range(begin, 3) for m in range(sizes[i])]
    assert of_all_replicas(of, 0, sizes, begin) == of_all_replicas(of, 2, sizes, begin) == expected
    assert of_all_replicas(of, 1, sizes, begin) == []


@pytest.mark.parametrize("begin, stream_start", [(0, 0), (2, 0), (4, 4), (6, 4), (9, 4)])
def test_the_rest_of_a_stream_is_loaded_from_where_it_was_left(begin, stream_start):
    of, sizes = plan([2, 1], 1, "pipedream"), [1] * 9
    expected = [(i, 0) for i in range(begin, 9)]
    assert of_all_replicas(of, 0, sizes, begin, stream_start) == expected
    assert of_all_replicas(of, 1, sizes, begin, stream_start) == expected


def test_of_a_stream_of_minibatches_each_microbatch_is_loaded():
    of, sizes = plan([1, 1], 3, "pipedream-2bw"), [3, 3, 3, 2]
    expected = [(i, m) for i in range(1, 4) for m in range(sizes[i])]
    assert of_all_replicas(of, 0, sizes, 1, 0) == expected
    assert of_all_replicas(of, 1, sizes, 2, 1) == expected[3:]


def test_an_evaluation_is_loaded_by_the_same_ranks():
    of = plan([2, 1], 4)
    assert worker(of, Place(0, 1)).loads_to_infer([4, 2]) == [(0, 1), (0, 3), (1, 1)]
    assert worker(of, Place(1, 0)).loads_to_infer([4, 1]) == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0)]
