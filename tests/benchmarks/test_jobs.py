"""The programs of the peers: each trains a tiny model, and all synchronous ones end with one loss."""

import sys

import jobs
import pytest
from jobs import Way, merged, reason
from results import Row

sys.path.insert(0, str(jobs.PROGRAMS))
import common

ARGUMENTS = ("--cuts", "3", "--minibatches", "4", "--microbatches", "4")
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMPI_MCA_mpi_yield_when_idle": "1"}


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    """The loss that it ends with."""
    return outcome(Way("one", "one_process", ranks=1), tmp_path_factory.mktemp("one"))["loss"]


def outcome(way: Way, folder) -> Row:
    done = jobs.start(way, "tiny", "tiny", 0, folder, arguments=ARGUMENTS, environment=ENVIRONMENT)
    assert not done.error, (folder / "log.txt").read_text()
    return done


@pytest.mark.parametrize(
    "program, variant",
    [
        ("ddp", ""),
        ("plain_horovod", ""),
        ("plain_horovod", "tuned"),
        ("torch_pipelining", "Schedule1F1B"),
        ("ours", "dp"),
        ("ours", "1f1b"),
    ],
)
def test_two_ranks_end_with_the_loss_of_one_process(program, variant, one_process, tmp_path):
    done = outcome(Way(program, program, variant), tmp_path)
    assert done["loss"] == pytest.approx(one_process, rel=1e-5)
    assert done["seconds"] > 0


@pytest.mark.parametrize("variant", ["", "tuned"])
def test_the_ceiling_has_no_loss(variant, tmp_path):
    done = outcome(Way("halves", "halves", variant), tmp_path)
    assert done["loss"] is None and done["seconds"] > 0


@pytest.mark.parametrize("variant, fused, times", [("", None, 0), ("tuned", True, 1)])
def test_a_tuned_way_has_our_step_and_our_allocator(variant, fused, times, monkeypatch):
    kept = []
    monkeypatch.setattr(common, "keep_freed_memory", lambda: kept.append(True))
    monkeypatch.setattr(common.torch, "set_num_threads", lambda _: None)  # of this process
    monkeypatch.setattr("sys.argv", ["way", "tiny", "--variant", variant, "--out", "nowhere"])
    job = common.load_job()
    assert job.optimizer(job.model().parameters()).param_groups[0]["fused"] is fused
    assert len(kept) == times


def test_a_program_that_fails_is_an_outcome_with_its_reason(tmp_path):
    done = jobs.start(Way("no", "ours", "nowhere.json", 1), "tiny", "tiny", 0, tmp_path)
    assert done["seconds"] is None and "nowhere.json" in done.error


def test_the_slowest_rank_counts_and_parts_of_the_loss_add_up():
    reports = [{"seconds": [1.0], "losses": [9.0, 0.5]}, {"seconds": [2.0], "losses": [9.0, 1.0]}]
    assert merged(reports) == {"seconds": 2.0, "loss": 1.5}
    with_processor = [{**report, "processor": [0.25]} for report in reports]
    assert merged(with_processor) == {"seconds": 2.0, "loss": 1.5, "processor": 0.5}


def test_the_reason_is_the_first_error_of_a_log():
    log = "Traceback\n  File x\nValueError: first\n[rank1]: RuntimeError: second\nmpirun: exit code 1"
    assert reason(log) == "ValueError: first"
    assert reason("just\nended") == "ended"
