"""What one process can see of it; tests/mpi ends whole jobs."""

import atexit
import builtins
import io
import re
import sys
import threading
from types import SimpleNamespace

import pytest

from hybridpipe.comm.status import Doing, rank_status
from hybridpipe.health import failure
from hybridpipe.planning import plan
from hybridpipe.planning.checks import one_of
from hybridpipe.planning.schedules.instructions import Forward


def cause(text):
    try:
        int(text)
    except ValueError as error:
        raise TypeError("caused") from error


def noted(text):
    try:
        one_of("schedule", text, ["1f1b"])
    except ValueError as error:
        error.add_note("in the forward")
        raise


@pytest.fixture
def two_ranks(monkeypatch):
    """As under mpirun, with what `install` changes put back afterwards."""
    hooks = []
    monkeypatch.setattr(failure, "MPI", SimpleNamespace(COMM_WORLD=SimpleNamespace(size=2, rank=0)))
    monkeypatch.setattr(atexit, "register", hooks.append)
    for module, name in [(sys, "excepthook"), (sys, "exit"), (threading, "excepthook"), (builtins, "exit"),
                         (builtins, "quit"), (failure, "_last_exit")]:  # fmt: skip
        monkeypatch.setattr(module, name, getattr(module, name))
    failure.install()
    return hooks


@pytest.fixture
def aborted(monkeypatch) -> list[BaseException]:
    errors = []
    monkeypatch.setattr(failure, "_abort", lambda error, stack=(): errors.append(error))
    return errors


def test_a_world_of_one_rank_is_left_alone(aborted):
    hook, leave = sys.excepthook, sys.exit
    failure.install()
    assert (sys.excepthook, sys.exit) == (hook, leave)
    with pytest.raises(ZeroDivisionError), failure.guard():
        raise ZeroDivisionError
    assert aborted == []


def test_an_error_in_a_step_ends_the_job(two_ranks, aborted):
    with pytest.raises(ZeroDivisionError), failure.guard():
        raise ZeroDivisionError
    assert [type(error) for error in aborted] == [ZeroDivisionError]


def test_an_error_of_a_thread_ends_the_job(two_ranks, aborted):
    def fail():
        raise ZeroDivisionError

    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()
    assert [type(error) for error in aborted] == [ZeroDivisionError]


@pytest.mark.parametrize("leave", ["sys.exit(3)", "exit(3)", "quit(3)", "sys.exit('a reason')"])
def test_every_way_out_with_an_error_ends_the_job(two_ranks, aborted, leave):
    with pytest.raises(SystemExit) as left:
        eval(leave)
    (at_exit,) = two_ranks
    at_exit()
    assert [error.code for error in aborted] == [left.value.code]


@pytest.mark.parametrize("leave", ["sys.exit()", "sys.exit(0)", "exit()"])
def test_leaving_without_an_error_does_not(two_ranks, aborted, leave):
    with pytest.raises(SystemExit):
        eval(leave)
    two_ranks[0]()
    assert aborted == []


def test_an_exit_that_was_caught_does_not(two_ranks, aborted, monkeypatch):
    with pytest.raises(SystemExit):
        sys.exit(3)
    monkeypatch.setattr(rank_status, "doing", Doing(0, 1, Forward(0)))  # whoever caught it trains on
    two_ranks[0]()
    assert aborted == []


def test_a_rank_alone_says_what_an_error_of_memory_means(aborted):
    with pytest.raises(MemoryError) as caught, failure.guard():
        raise MemoryError
    assert caught.value.__notes__[0].startswith("out of memory: the process has had")


class Pipe(io.RawIOBase):
    """Notes what each write holds."""

    def __init__(self):
        self.writes = []

    def writable(self):
        return True

    def write(self, data):
        self.writes.append(bytes(data))
        return len(data)


def test_last_words_are_one_write(monkeypatch):
    """Mpirun's box stood between a traceback and the end of its last line, which a page's test looked for."""
    pipe = Pipe()
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(pipe, line_buffering=True, write_through=True))
    failure.print_in_one_piece("Traceback\n  a line\nthe error")
    assert pipe.writes == [b"Traceback\n  a line\nthe error\n"]


def raised(function, *arguments, **options):
    with pytest.raises(Exception) as caught:
        function(*arguments, **options)
    return failure._mistake(caught.value)


def test_what_we_refuse_of_an_argument_is_a_mistake_and_names_the_scripts_line():
    line = raised(plan.StageSpec, 3, 2)
    assert re.fullmatch(r"stop must be .*, got 2.* \(test_failure.py:\d+\)", str(line)), line
    assert line.exit_code == 2
    assert str(raised(one_of, "schedule", "gpip", ["1f1b"])).startswith("schedule must be one of 1f1b, got")


@pytest.mark.parametrize(
    "function, arguments",
    [
        (int, "x"),  # raised by Python
        (plan.Plan, 5),  # a TypeError within the package that nothing raises
        (cause, "x"),  # a user's error has caused it
        (noted, "x"),  # within the user's code
    ],
)
def test_other_errors_keep_their_traceback(function, arguments):
    assert raised(function, arguments) is None
