"""CUDA IPC's protocol between processes: shared memory stands for a GPU's, and threads for its streams."""

import re

import pytest


def by_ipc(done) -> list[int]:
    """Return the number of trainings that each rank did over slots."""
    return [int(found) for found in re.findall(r"rank \d: (\d+) couriers by IPC", done.stdout)]


@pytest.mark.parametrize("ranks", [2, 3])
def test_messages_of_all_sizes_arrive_whole_and_with_the_values_of_their_moment(job, ranks):
    done = job(ranks, "ipc.py", "messages")
    assert done.stdout.count("messages to each of") == ranks


def test_plans_train_what_one_process_trains(job):
    done = job(4, "ipc.py", "none", "on_device.py", "cpu", "exact")
    assert done.stdout.count("losses within") == 4 and sum(by_ipc(done)) > 0
    assert "pinned memory" not in done.stdout


def test_gradients_of_shared_parameters_travel_so_too(job):
    done = job(3, "ipc.py", "none", "shared_parameters.py", "1-1", "2-1")
    assert done.stdout.count("copies equal") == 2 * 3 * 2 and sum(by_ipc(done)) > 0


@pytest.mark.parametrize(
    "fault, why", [("wrong", "64 bytes arrived wrong"), ("error", "invalid device context")]
)
def test_a_trial_that_fails_is_said_in_one_line_and_messages_are_staged(job, fault, why):
    done = job(4, "ipc.py", fault, "on_device.py", "cpu", "exact")
    assert done.stdout.count("losses within") == 4
    told = re.findall(r"hybridpipe: messages between ranks (.*) go through pinned memory; (.*)", done.stdout)
    assert {line for _, line in told} == {f"CUDA IPC failed: RuntimeError: {why}"}
