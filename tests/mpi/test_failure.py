"""An error of the user's own code ends the job within seconds, and the last lines say who, where and why.

Faults at every point are in test_failure_points.py.
"""

import re
import time

import pytest

from tests.mpi.output import own_lines

# plan, failing rank, its stage: the peers wait in a receive, in Horovod, or both
PLACES = [
    ("raise", "1-1-1", 1, 1),
    ("exit", "3", 2, 0),
    ("thread", "2-1", 0, 0),
    ("backward", "1-2", 2, 1),
]


@pytest.mark.alone  # within seconds
@pytest.mark.parametrize("kind, plan, rank, stage", PLACES)
def test_an_error_in_a_step_ends_the_job(job, kind, plan, rank, stage):
    done = job(3, "failing.py", kind, plan, str(rank), fails=True)
    ended = time.time()
    failed = float(re.search(r"failing at ([\d.]+)", done.stdout)[1])
    assert ended - failed < 5.0
    reports = re.findall(r"hybridpipe: rank (\d+) on host (\S+), (.*)", done.stdout)
    assert len(reports) == 1, done.stdout
    found_rank, _, where = reports[0]
    assert int(found_rank) == rank
    assert f"stage {stage}, step 2, microbatch" in where
    assert ("SystemExit: 3" if kind == "exit" else "RuntimeError: injected") in where
    assert "Traceback (most recent call last)" in done.stdout
    assert "in fail" in done.stdout, "the original traceback"


@pytest.mark.parametrize("plan", ["1-1-1", "3"])
def test_sys_exit_outside_a_step_ends_the_job(job, plan):
    """With plan 3, Horovod's own exit handler came first: a peer failed, and the report named that one."""
    done = job(3, "failing.py", "exit-outside", plan, "1", fails=True)
    assert "rank 1 on host" in done.stdout
    assert "outside a step, after step 1: SystemExit: 3" in done.stdout
    assert "in <module>\n    sys.exit(3)" in done.stdout, "the original traceback"


def test_an_error_while_the_plan_is_made_ends_the_job(job):
    """Rank 0 measures the model; a script that catches its error would leave the others in the probe."""
    done = job(2, "unmeasurable.py", fails=True)
    assert "RuntimeError: mat1 and mat2 shapes" in done.stdout and "rank 0 on host" in done.stdout


@pytest.mark.parametrize("zero, plan", [("0", "straight"), ("0", "dp"), ("0", "auto"), ("auto", "dp")])
def test_an_optimizer_that_cannot_be_made_on_one_rank_ends_the_job(job, zero, plan):
    """In a trial, a measurement or its stage: a script that catches it left the others waiting."""
    done = job(2, "unmeasurable.py", zero, plan, fails=True)
    assert done.stdout.count("hybridpipe: rank 1 on host") == 1 and "caught" not in done.stdout
    assert "RuntimeError: only here; ending the job" in done.stdout


def test_a_mistake_that_one_rank_sees_is_told(job):
    done = job(2, "refusing.py", "1", fails=True)
    assert done.returncode == 2 and done.stdout.count("hybridpipe: only here") == 1


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", ["log.csv", "run.json", "full"])
def test_a_scripts_file_that_rank_0_cannot_write_ends_the_job(job, tmp_path, name):
    """The other rank waited for the watchdog: 300 s, after which rank 0 was blamed."""
    done = job(2, "refusing.py", "0", str(tmp_path), name, fails=True, timeout_seconds=200)
    told = f"hybridpipe: {tmp_path}/{name}: cannot be written: it exists and is no regular file"
    if name == "full":  # another attempt may succeed
        told = f"hybridpipe: {tmp_path}/metrics.jsonl: cannot be written: File too large"
    assert done.returncode == (1 if name == "full" else 2) and done.stdout.count(told) == 1
    assert "Traceback" not in done.stdout


def test_a_mistake_on_all_ranks_is_told_once(job):
    """An argument of a script: it was a traceback with exit code 1, which `launch` starts again."""
    done = job(3, "failing.py", "mistake", "1-1-1", "0", fails=True)
    (line,) = own_lines(done.stdout)
    assert re.fullmatch(r"hybridpipe: .*plan needs 2 \+ 2 = 4 ranks, got 3.* \(failing.py:\d+\)", line)
    assert done.returncode == 2 and "Traceback" not in done.stdout


def test_a_mistake_in_a_data_loader_is_one_line(job):
    """It was a traceback with exit code 1, so the job was started again."""
    done = job(2, "failing.py", "loader", "1-1", "0", fails=True)
    (line,) = (each for each in done.stdout.splitlines() if "DataLoader" in each)
    assert "hybridpipe: dataset is a DataLoader with batch_size = 4, and minibatch_size = 12: make" in line
    assert done.returncode == 2 and "Traceback" not in done.stdout


@pytest.mark.alone  # within seconds
@pytest.mark.parametrize("schedule", ["pipedream", "pipedream-2bw"])
@pytest.mark.parametrize("way", ["raise", "one", "exit"])
def test_fit_left_in_the_middle_of_an_asynchronous_epoch_ends_the_job(job, schedule, way):
    done = job(3, "leaving.py", schedule, way, fails=True)
    ended = time.time()
    assert ended - float(re.findall(r"leaving at ([\d.]+)", done.stdout)[-1]) < 5.0
    reports = re.findall(r"hybridpipe: rank (\d+) on host \S+, (.*)", done.stdout)
    assert len(reports) == 1, done.stdout
    rank, what = reports[0]
    if way == "exit":
        assert "SystemExit: 3" in what and done.returncode == 3
    else:
        assert f"middle of an epoch, which several ranks cannot do under {schedule}" in what
        assert "Enough: seen enough" in done.stdout and "in leave" in done.stdout, "the cause"
    assert way != "one" or rank == "0"


def test_fit_left_by_all_ranks_between_synchronous_minibatches_can_go_on(job):
    done = job(3, "leaving.py", "1f1b", "raise")
    assert "went on" in done.stdout and "[57, 57, 57]" in done.stdout  # 7 before, one of them not yet told


@pytest.mark.parametrize("where", ["mpi", "horovod"])
def test_a_thread_can_end_the_job_though_mpi_abort_hangs(job, where):
    """It did in one of ten runs with Horovod. The thread that calls it keeps Python's lock meanwhile."""
    done = job(2, "stuck.py", where, fails=True)
    assert time.time() - float(re.search(r"ending at ([\d.]+)", done.stdout)[1]) < 30.0  # against hanging
    assert re.search(r"exited\s+on\s+signal 14", done.stdout), done.stdout


@pytest.mark.parametrize(
    "way, method, rank",
    [
        ("sleeps", "evaluate", 0),
        ("has ended", "evaluate", 0),
        ("sleeps", "save", 0),
        ("has ended", "resume", 1),
    ],
)
def test_a_method_that_only_one_rank_calls_is_told_to_be_collective(job, tmp_path, way, method, rank):
    done = job(2, "alone.py", way, method, str(rank), str(tmp_path), fails=True)
    (report,) = re.findall(rf"hybridpipe: rank {1 - rank} on host .*ending the job", done.stdout)
    assert "methods of Trainer are collective: every rank has to call them, in the same order" in report


def test_a_disk_may_be_slow_as_long_as_it_moves(job, tmp_path):
    """Both ranks wait for the checkpoint for longer than the timeout; a disk that stops ends that."""
    told = job(2, "slowdisk.py", str(tmp_path), "9", "0").stdout
    assert min(map(float, re.findall(r"saved in ([\d.]+) s", told))) > 4, told
    told = job(2, "slowdisk.py", str(tmp_path), "2", "60", fails=True).stdout
    blamed = r"rank 1 on host \S+ writes stage-001\.safetensors, and its disk has accepted no data for \d+ s"
    assert re.search(f"hybridpipe: {blamed}", told), told


def test_ranks_that_differ_do_not_start(job):
    told = job(3, "differing.py").stdout
    for rank in range(3):
        refused = re.findall(rf"rank {rank} refused: (.*)", told)
        assert [line.partition(" must be the same on all ranks: ")[::2] for line in refused] == [
            (
                "0.weight of the model",
                "rank 0 has (4, 4) float32, rank 2 has (5, 4) float32",
            ),
            ("optimizer", "rank 0 has SGD(lr=0.1), rank 2 has SGD(lr=0.2)"),
            ("plan", refused[2].partition("ranks: ")[2]),
            ("minibatch_size", "rank 0 has 8, rank 2 has 16"),
            ("seed", "rank 0 has 0, ranks 1, 2 have 7"),
            ("checkpoint", "rank 0 has None, rank 2 has Checkpointing(folder='unused', every=None, keep=3)"),
        ], told
    assert told.count("trains") == 3
