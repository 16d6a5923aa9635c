"""A claimed folder: who is kept out, what is told, and whose claim no longer counts."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from threading import Timer

import pytest

from hybridpipe.checkpoint import claim as claims
from hybridpipe.checkpoint.claim import Claim, Holder
from hybridpipe.checkpoint.names import LOCK
from hybridpipe.errors import UserError

CLAIMS = """
import errno, fcntl, os, sys, time
from pathlib import Path
from hybridpipe.checkpoint.claim import Claim
from hybridpipe.errors import UserError

def without_locks(*_):
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

def late(*given, truncated=os.ftruncate):
    time.sleep(0.2)
    truncated(*given)

if "without locks" in sys.argv:
    fcntl.flock, os.ftruncate = without_locks, late  # time to look passes before anybody writes
print("ready", flush=True)
sys.stdin.readline()
try:
    claim = Claim(Path(sys.argv[1]))
except UserError as error:
    print(error, flush=True)
    sys.exit(2)
child = os.fork()
if not child:
    print(os.getpid(), flush=True)  # a child that has begun: what is to be done at a fork is done
    time.sleep(60)
    os._exit(0)
time.sleep(60)
"""


@pytest.fixture
def start():
    """Processes that claim a folder when they read a line, and then have a child, as a data set may have."""
    started = []

    def run(folder: Path, *options: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", CLAIMS, str(folder), *options]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        started.append(subprocess.Popen(command, text=True, start_new_session=True, **pipes))
        assert started[-1].stdout.readline() == "ready\n"
        return started[-1]

    yield run
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def claimed(process: subprocess.Popen[str]) -> str:
    """Let it claim; return what it says."""
    process.stdin.write("\n")
    process.stdin.flush()
    return process.stdout.readline().strip()


def test_who_holds_the_folder_is_told(start, tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    holder = start(tmp_path / "run")
    assert claimed(holder).isdigit()
    who = f"process {holder.pid} on {os.uname().nodename}, job 77"
    told = f"{tmp_path}/run: another running training writes there ({who}): end it, or take another folder"
    with pytest.raises(UserError) as refused:
        Claim(tmp_path / "run")
    assert str(refused.value) == told


def test_a_claim_ends_with_its_process_though_a_child_lives_on(start, tmp_path):
    """It inherits the descriptor, and with it the lock of the file."""
    holder = start(tmp_path)
    child = int(claimed(holder))
    holder.kill()
    holder.wait()
    os.kill(child, 0)
    Claim(tmp_path).release()


@pytest.mark.parametrize("options", [[], ["without locks"]])
def test_of_several_at_once_one_has_the_folder(start, tmp_path, options):
    """Without locks all of them found the file empty."""
    processes = [start(tmp_path, *options) for _ in range(4)]
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    said = [process.stdout.readline().strip() for process in processes]
    refused = [line for line in said if "another running training writes there" in line]
    assert len(refused) == 3 and sum(line.isdigit() for line in said) == 1, said


def test_a_claim_of_this_process_names_the_remedy(tmp_path):
    first = Claim(tmp_path)
    with pytest.raises(UserError, match=r"\(a Trainer of this process, which is not closed\)"):
        Claim(tmp_path)
    first.release()
    second = Claim(tmp_path)
    first.release()  # again: the second one's stays
    with pytest.raises(UserError):
        Claim(tmp_path)
    second.release()


def test_a_training_that_nobody_has_any_more_holds_nothing(tmp_path):
    Claim(tmp_path)
    Claim(tmp_path).release()


def test_a_restart_waits_for_the_lock_of_the_start_before(tmp_path, monkeypatch, capsys):
    """A file server keeps the locks of a lost host for a while; the restart would be refused for good."""
    before = Claim(tmp_path)
    monkeypatch.setenv("HYBRIDPIPE_ATTEMPT", "1")
    released = Timer(0.5, before.release)
    released.start()
    Claim(tmp_path).release()
    released.join()
    told = f"hybridpipe: {tmp_path} is still locked: waiting up to 100 s for its release\n"
    assert capsys.readouterr().err == told, "else it looks like a hang"
    held = Claim(tmp_path)
    monkeypatch.setattr(claims, "LEASE_SECONDS", 0.3)
    began = time.monotonic()
    with pytest.raises(UserError, match="another running training"):
        Claim(tmp_path)
    assert time.monotonic() - began > 0.3
    held.release()


@pytest.fixture
def without_locks(monkeypatch):
    """A file system that knows no locks, such as Lustre without the mount option."""

    def flock(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(claims.fcntl, "flock", flock)


def test_without_locks_what_the_file_says_decides(without_locks, start, tmp_path, monkeypatch):
    holder = claims._this_process()
    assert not holder.is_gone
    elsewhere = replace(holder, pid=1, machine="another", host="node2", job="77")
    ended = subprocess.Popen(["true"])
    ended.wait()
    gone = replace(holder, pid=ended.pid), replace(holder, begun="1")  # its number is another process's now
    lock = tmp_path / LOCK
    for each in gone:
        lock.write_text(json.dumps(asdict(each)))
        Claim(tmp_path).release()
    for each in (holder, elsewhere):
        lock.write_text(json.dumps(asdict(each)))
        with pytest.raises(UserError, match=r"take another folder or, if that is gone, remove \.lock there"):
            Claim(tmp_path)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    Claim(tmp_path).release()  # the job was requeued: its start before is over


def test_a_start_that_is_interrupted_while_it_waits_leaves_the_holders_name(
    without_locks, tmp_path, monkeypatch
):
    """It emptied the file, which then kept nobody out."""
    lock = tmp_path / LOCK
    lock.write_text(json.dumps(asdict(claims._this_process())))
    before = lock.read_text()

    def interrupted(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setenv("HYBRIDPIPE_ATTEMPT", "1")
    monkeypatch.setattr(claims.time, "sleep", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Claim(tmp_path)
    assert lock.read_text() == before


@pytest.mark.parametrize("text", ["", "x", "[]", "{}", '{"pid": "1"}', "[" * 4096, '{"pid": 1, "begun": 2}'])
def test_a_file_that_names_nobody_keeps_nobody_out(without_locks, tmp_path, text):
    (tmp_path / LOCK).write_text(text)
    claim = Claim(tmp_path)
    assert Holder(**json.loads((tmp_path / LOCK).read_text())).pid == os.getpid()
    claim.release()


def test_a_folder_that_cannot_be_claimed_is_told_in_one_line(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "run" / LOCK).mkdir(parents=True)
    for folder, told in (
        ("file/run", "file/run: cannot be written: Not a directory"),
        ("run", "run/.lock: cannot be written: Is a directory"),
    ):
        with pytest.raises(UserError) as refused:
            Claim(tmp_path / folder)
        assert str(refused.value) == f"{tmp_path}/{told}"
