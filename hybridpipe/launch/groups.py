"""Groups as jobs: starts each group's job under a supervisor of its own, and goes on without those lost.

Knows no MPI and no torch; the groups exchange at a `Meeting` in this process.
Invariant: when this process ends, no group runs.
"""

import os
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from hybridpipe.environment import GROUP_OF_JOB
from hybridpipe.errors import UserError
from hybridpipe.launch.meeting import Meeting
from hybridpipe.launch.supervisor import PROGRAM, stop_signals
from hybridpipe.notices import notices

POLL_SECONDS = 0.2
OUTPUT = "output.txt"  # of a group behind the first one, in its folder


@dataclass(frozen=True)
class GroupLaunch:
    """Groups to be launched.

    Args:
        count: number of groups.
        least: the fewest to go on with.
        ranks: of all groups together.
        slots: the most ranks of each host; empty for this host.
        options: further options of `hybridpipe launch` for each group's job.
        words: the command of every rank.
        out: the training's folder, in which further groups have folders of their own.
    """

    count: int
    least: int
    ranks: int
    slots: Mapping[str, int]
    options: Sequence[str]
    words: Sequence[str]
    out: Path

    def __post_init__(self) -> None:
        if self.ranks % self.count:
            raise UserError(f"launch: --groups must divide the {self.ranks} ranks, got {self.count}")
        if not 1 <= self.least <= self.count:
            raise UserError(f"launch: --min-groups must be from 1 to {self.count}, got {self.least}")

    def hosts(self, index: int) -> dict[str, int]:
        """Return the hosts of a group, with its ranks on each: groups fill the hosts one after the other."""
        each = self.ranks // self.count
        seats = [host for host, slots in self.slots.items() for _ in range(slots)][
            index * each : (index + 1) * each
        ]
        return {host: seats.count(host) for host in dict.fromkeys(seats)}

    def command(self, index: int) -> list[str]:
        """Return the command of a group's supervisor."""
        hosts = ",".join(f"{host}:{slots}" for host, slots in self.hosts(index).items())
        where = ["--hosts", hosts] if hosts else []
        ranks = ["--ranks", str(self.ranks // self.count)]
        return [*PROGRAM, "launch", *ranks, *where, *self.options, "--", *self.words_of(index)]

    def words_of(self, index: int) -> list[str]:
        """Return the command of a group's ranks; `train` gets a folder of its own."""
        words = list(self.words)
        if index and words[:1] == ["train"]:
            words += ["--out", str(self.folder(index))]  # the last one counts
        return words

    def folder(self, index: int) -> Path:
        """Return the folder of a group."""
        return self.out / f"group-{index}" if index else self.out


def supervise_groups(launch: GroupLaunch) -> int:
    """Run all groups to their end.

    Returns:
        0 if as many as needed have ended well; else the exit code of the lowest group that has not.
    """
    meeting = Meeting(launch.count, socket.gethostname() if launch.slots else "127.0.0.1")
    running: dict[int, subprocess.Popen[bytes]] = {}
    codes: dict[int, int] = {}
    asked = False
    with stop_signals() as stop:
        try:
            for index in range(launch.count):
                running[index] = _start(launch, index, meeting)
            while running:
                time.sleep(POLL_SECONDS)
                ended = {index: job.poll() for index, job in running.items()}
                for index, code in ended.items():
                    if code is not None:
                        del running[index]
                        codes[index] = code
                        meeting.give_up(index)
                        _tell(launch, index, code, len(running))
                well = len(running) + list(codes.values()).count(0)
                if running and not asked and (stop.signum is not None or well < launch.least):
                    asked = True
                    for job in running.values():
                        job.terminate()
        finally:
            for job in running.values():
                job.terminate()
            for job in running.values():
                job.wait()
            meeting.close()
    lost = [code for _, code in sorted(codes.items()) if code]
    return 0 if len(codes) - len(lost) >= launch.least else lost[0]


def _start(launch: GroupLaunch, index: int, meeting: Meeting) -> "subprocess.Popen[bytes]":
    env = {**os.environ, GROUP_OF_JOB: f"{index} {launch.count} {meeting.address}"}
    output: IO[bytes] | None = None
    if index:
        try:
            launch.folder(index).mkdir(parents=True, exist_ok=True)
            output = (launch.folder(index) / OUTPUT).open("ab")
        except OSError as error:
            raise UserError(f"{launch.folder(index)}: cannot be written: {error.strerror}") from None
    try:
        return subprocess.Popen(launch.command(index), env=env, stdout=output, start_new_session=True)
    finally:
        if output is not None:
            output.close()


def _tell(launch: GroupLaunch, index: int, code: int, left: int) -> None:
    """Say that a group has ended."""
    if code:
        others = f"{left} of {launch.count} go on" if left else "none is left"
        notices.say(f"group {index} has ended with exit code {code}; {others}")
