"""Shapes that change from minibatch to minibatch and from microbatch to microbatch, under mpirun."""

import pytest

from tests.mpi.output import own_lines


@pytest.mark.parametrize(
    "schedule, plans, count",
    [
        ("gpipe", ["1-1", "2-1"], 10),
        ("1f1b", ["1-1", "2-1"], 10),
        ("zero-bubble", ["1-1", "2-1"], 10),
        ("interleaved-1f1b", ["1-1x2"], 6),
        ("pipedream", ["1-1", "2-1"], 6),
        ("pipedream-2bw", ["1-1"], 4),
    ],
)
def test_any_lengths_train_as_in_one_process(job, schedule, plans, count):
    done = job(3, "changing_shapes.py", schedule, *plans, timeout_seconds=180)
    assert done.stdout.count(": within") == count, done.stdout


def test_ranks_that_pad_to_different_lengths_are_told_in_one_line(job):
    done = job(3, "changing_shapes.py", "differing", fails=True)
    lines = own_lines(done.stdout)
    assert len(lines) == 1 and "form" in lines[0], done.stdout
