"""Output of a launcher: what its ranks print passes at once; its report of a job's end is held back.

Not known here: why a job ended. Invariant: apart from NUL bytes, whatever is not held back passes unchanged.
"""

import contextlib
import os
import re
import select
import sys
import threading
from typing import IO, Any

RULE = b"-" * 74 + b"\n"  # above and below what Open MPI tells
# The first line below the rule. Other boxes, such as warnings, pass.
ENDS = re.compile(rb"(prterun|mpirun) (noticed|detected|has exited)|MPI_ABORT was invoked|Primary job ")
LONGEST = 40  # lines of a box
# srun tells of the same in single lines.
SRUN = re.compile(
    rb"srun: (error: \S+: tasks? [\d,-]+: |launch/slurm: _step_signal|Job step aborted|Force Terminated)"
    rb"|slurmstepd\S*: error: \*\*\* STEP "
)
# Open MPI 4 and 5, and srun: which rank was lost, and where. srun kills the others of a failed one, too.
LOST = re.compile(
    rb"process rank (?P<rank>\d+) with PID \d+ on node (?P<host>\S+) exited on\s+signal"
    rb"|^srun: error: (?P<node>\S+): task (?P<task>\d+): (Killed|Segmentation|Bus|Aborted|Illegal|Floating)",
    re.M,
)
HELD_SECONDS = 0.2  # for the line after a rule, which may be a rank's own


class Output:
    """A launcher's standard error on its way to this process's own, copied by a thread."""

    def __init__(self, source: IO[Any]) -> None:
        self._source, self._held, self._boxes = source, b"", b""
        self._is_inside = False  # of a line that has passed in part
        self._lost: re.Match[bytes] | None = None
        self._thread = threading.Thread(target=self._copy, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Wait for the end of the output, which the job's last process closes."""
        self._thread.join(5)

    def boxes(self) -> str:
        """Return what was held back."""
        return self._boxes.decode(errors="replace")

    def lost(self) -> str:
        """Return the first lost rank, as "rank 1 on host h2"; "" if none is known."""
        if self._lost is None:
            return ""
        found = {name: value.decode() for name, value in self._lost.groupdict(b"").items()}
        rank, host = found["rank"] or found["task"], found["host"] or found["node"]
        return f"rank {rank} on host {host}"

    def _copy(self) -> None:
        descriptor = self._source.fileno()
        while True:
            if self._held and not self._is_box() and not select.select([descriptor], [], [], HELD_SECONDS)[0]:
                self._pass_held()
            read = os.read(descriptor, 2**16)
            for line in read.replace(b"\0", b"").splitlines(keepends=True):
                self._take(line)
            if not read:
                self._pass_held()
                self._source.close()
                return

    def _is_box(self) -> bool:
        return self._held.startswith(RULE) and bool(ENDS.match(self._held, len(RULE)))

    def _take(self, piece: bytes) -> None:
        """Take a line, or a part of one: it passes, unless it may belong to a box."""
        if not (self._is_inside or self._held) and piece.endswith(b"\n") and SRUN.match(piece):
            self._note_lost(piece)
            self._boxes += piece
            return
        if self._is_inside or not (self._held or RULE.startswith(piece)):
            self._is_inside = not piece.endswith(b"\n")
            self._pass(piece)
            return
        self._held += piece
        lines = self._held.splitlines(keepends=True)
        if self._is_box() and len(lines) > 2 and lines[-1] == RULE:
            self._note_lost(self._held)
            self._boxes, self._held = self._boxes + self._held, b""
        elif not RULE.startswith(lines[0]) or len(lines) > LONGEST:
            self._pass_held()
        elif len(lines) > 1 and lines[1].endswith(b"\n") and not self._is_box():
            first, rest = self._held[: len(RULE)], self._held[len(RULE) :]
            self._held = b""
            self._pass(first)
            self._take(rest)  # perhaps a rule again

    def _pass_held(self) -> None:
        held, self._held = self._held, b""
        self._is_inside = bool(held) and not held.endswith(b"\n")
        self._pass(held)

    def _pass(self, data: bytes) -> None:
        self._note_lost(data)
        with contextlib.suppress(OSError, ValueError):  # nobody reads, but the job must not wait
            if hasattr(sys.stderr, "buffer"):
                sys.stderr.buffer.write(data)
            else:  # a notebook's
                sys.stderr.write(data.decode(errors="replace"))
            sys.stderr.flush()

    def _note_lost(self, data: bytes) -> None:
        self._lost = self._lost or LOST.search(data)
