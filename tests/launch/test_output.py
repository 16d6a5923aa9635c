"""The output of launchers: what ranks print passes as it comes, what says nothing new is held back."""

import io
import os
import sys
import time

import pytest

from hybridpipe.launch.output import Output

RULE = "-" * 74 + "\n"
KILLED = (
    f"{RULE}prterun noticed that process rank 1 with PID 31 on node h2 exited on\nsignal 9 (Killed).\n{RULE}"
)
ABORT = f"{RULE}MPI_ABORT was invoked on rank 1\n\nNOTE: all are killed\n{RULE}"
ALSO_KILLED = "srun: error: h1: task 0: Killed\n"
WARNING = f"{RULE}A component could not be loaded:\n  btl\n{RULE}"


@pytest.fixture
def copied(capfdbinary):
    """`copied(pieces)`: what passes of them, written one after the other, and the closed `Output`."""

    def copy(*pieces, pause=0.0):
        reading, writing = os.pipe()
        output = Output(os.fdopen(reading, "rb"))
        for piece in pieces:
            os.write(writing, piece.encode())
            time.sleep(pause)
        os.close(writing)
        output.close()
        return capfdbinary.readouterr().err.decode(), output

    return copy


def test_boxes_about_the_end_are_held_back_and_nul_bytes_go(copied):
    passed, output = copied(f"a\n{ABORT}b\n{KILLED}", "\0c\0\n")
    assert passed == "a\nb\nc\n" and output.boxes() == ABORT + KILLED
    assert output.lost() == "rank 1 on host h2"


def test_a_box_in_pieces_is_one(copied):
    passed, output = copied(*(ABORT[i : i + 30] for i in range(0, len(ABORT), 30)), pause=0.01)
    assert (passed, output.boxes()) == ("", ABORT)


@pytest.mark.parametrize(
    "text",
    [
        WARNING,
        RULE,
        RULE * 3 + "x",
        "a table\n" + RULE + "1  2\n" + RULE,
        "-5.2\n--\n- item\n",
        ABORT[:-20],
        "é\r 10%\r 20%",
        RULE + "prterun noticed nothing\n" + "a line\n" * 60,
    ],
)
def test_all_else_passes_unchanged(copied, text):
    passed, output = copied(text)
    assert (passed, output.boxes(), output.lost()) == (text, "", "")


def test_a_line_that_is_not_ended_passes_at_once(capfdbinary):
    reading, writing = os.pipe()
    output = Output(os.fdopen(reading, "rb"))
    os.write(writing, b"10%\r--")
    for _ in range(100):
        time.sleep(0.05)
        if seen := capfdbinary.readouterr().err:
            break
    assert seen.startswith(b"10%")
    os.close(writing)
    output.close()


def test_a_notebook_whose_stderr_takes_text_only_does_not_stop_the_job(copied, monkeypatch):
    """The copying thread died of it, and ranks waited once the pipe was full."""
    notebook = io.StringIO()
    monkeypatch.setattr(sys, "stderr", notebook)
    text = "a line\n" * 20_000
    copied(text[:50_000], text[50_000:100_000], text[100_000:], pause=0.2)
    assert notebook.getvalue() == text


@pytest.mark.parametrize("reason", ["Killed", "Segmentation fault"])
def test_srun_says_which_task_was_lost_first(copied, reason):
    text = f"srun: Job step aborted: Waiting\nsrun: error: h2: task 1: {reason}\n{ALSO_KILLED}"
    passed, output = copied(f"a rank's\n{text}srun: nothing of the end\n")
    assert passed == "a rank's\nsrun: nothing of the end\n" and output.boxes() == text
    assert output.lost() == "rank 1 on host h2"
