"""Any backend sums what any other sums: gradients, weights and trainings are the same."""

import pytest

from hybridpipe.planning.checks import BACKENDS
from hybridpipe.planning.schedules.registry import SYNCHRONOUS, TRAITS

OTHERS = [name for name in BACKENDS if name != "horovod"]  # which all other tests take


@pytest.mark.parametrize("backend", BACKENDS)
def test_sums_rows_and_weights(job, backend):
    assert job(3, "collectives.py", backend).stdout.count(": right") == 1


@pytest.mark.parametrize("backend", OTHERS)
def test_parameters_and_losses_are_those_of_one_process(job, backend):
    """Also where replicas shard their update, and where ranks hold several stages."""
    plans = ["2", "3-1", "2-2:1:scatter", "1-3:2", "2-2:2:scatter"]
    ways, chunked = (
        sum(1 + TRAITS[s].splits_backward for s in SYNCHRONOUS if TRAITS[s].interleaves == held)
        for held in (False, True)
    )
    done = job(4, "exactness.py", "8", *(f"{plan}:{backend}" for plan in [*plans, "2-2x2"]))
    assert done.stdout.count("parameters within") == (len(plans) * ways + chunked) * 2  # optimizers


@pytest.mark.parametrize("backend", OTHERS)
def test_asynchronous_schedules_train_what_their_formulas_say(job, backend):
    done = job(4, "asynchronous.py", f"3-1:{backend}", f"2-2:{backend}")
    assert done.stdout.count("parameters within") == 2 * 3 * 2  # rules, optimizers


def test_a_training_goes_on_under_another_backend(job, tmp_path):
    plans = [f"2-2:1f1b:{backend}" for backend in BACKENDS]
    assert job(4, "resuming.py", "across", str(tmp_path / "two"), *plans).stdout.count("bit for bit") == 2
    plans = [f"3-1:pipedream:{backend}" for backend in BACKENDS]
    assert job(4, "resuming.py", "across", str(tmp_path / "three"), *plans).stdout.count("went on under") == 2


def test_an_error_of_the_thread_is_told_by_its_rank(job):
    """A later all-reduce once met another one of the other rank's, and wrote past the end of its buffer."""
    done = job(2, "spoilt_sum.py", fails=True)
    (line,) = [line for line in done.stdout.splitlines() if "ending the job" in line]
    assert "rank 1 on host" in line and "MemoryError: injected" in line, done.stdout
    assert "corruption" not in done.stdout and "Signal" not in done.stdout, done.stdout
