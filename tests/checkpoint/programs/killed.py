"""Saves, and dies of SIGKILL on the way, once or twice; then looks at what the loader finds.

    killed.py ROOT events SCENARIO [EVERY]     before every call that opens or changes something; of the pairs
                                               of moments for two kills in a row, every EVERYth
    killed.py ROOT points SCENARIO [EVERY]     at every point that HYBRIDPIPE_FAULT names

Every saving is a forked process: a few ms, or 40 with torch, which only the points inside of a shard need.
Calls that open, make, list, rename or remove are seen by an audit hook, so that none can be forgotten here.
Not seen are writes, which point save-shard stands for, and fsyncs, which a kill does not need.
Prints how many moments there were, and fails if after any of them the old or the new checkpoint is not whole.
"""

import os
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from hybridpipe.checkpoint import directory
from hybridpipe.checkpoint.disk import NewFile
from hybridpipe.checkpoint.manifest import FileEntry
from hybridpipe.checkpoint.names import parse_name
from hybridpipe.health import faults

DESCRIBED = {"epoch": 0, "position": 0, "plan": {}, "versions": {}, "run": {}}
FILES = ("rank-0000.safetensors", "stage-000.safetensors")

EVENTS = ("open", "os.", "shutil.")
POINTS = [point for point in faults.SAVING if point != "save-snapshot"]  # that one is not in this package
OLD, NEW = 100.0, 120.0
# From what is there to what is saved: a next step, or the same one once more, in the place of the first.
SCENARIOS = {"next": (2, (60, 80, 100), 120), "same": (1, (120,), 120)}  # how many are kept; there; saved

Arm = Callable[[], None]


def write_text_files(path: Path, value: float) -> list[FileEntry]:
    """As in the helpers, without torch."""
    entries = []
    for name in FILES:
        with NewFile(path / name) as file:
            file.write(str(value).encode())
        entries.append(file.entry)
    return entries


def text_value_of(path: Path) -> float:
    (said,) = {(path / entry.name).read_text() for entry in directory.verify(path).files}
    return float(said)


def before_event(number: int) -> Arm:
    """Die before the so many-th such call."""

    def arm() -> None:
        seen = 0

        def hook(event: str, _: object) -> None:
            nonlocal seen
            if event.startswith(EVENTS):
                seen += 1
                if seen == number:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)

    return arm


def at_point(point: str) -> Arm:
    """Die where HYBRIDPIPE_FAULT says."""

    def arm() -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # it announces itself
        vars(faults)["_faults"] = faults.from_environment({faults.VARIABLE: f"point={point},kind=kill"})

    return arm


@dataclass
class Trial:
    """What is saved, from what is there before: `template`, which says `OLD`."""

    root: Path
    template: Path
    step: int
    keep: int
    write_files: Callable[[Path, float], list[FileEntry]]
    value_of: Callable[[Path], float]

    def save(self, root: Path, step: int, value: float, keep: int = 9) -> None:
        files = self.write_files(directory.begin(root, step), value)
        directory.publish(root, step, files, DESCRIBED, keep)

    def attempt(self, arm: Arm) -> bool:
        """Save in a process of its own; whether it lived to the end."""
        child = os.fork()
        if child == 0:
            arm()
            self.save(self.root, self.step, NEW, self.keep)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert status == 0 or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL), status
        return status == 0

    def check(self, lived: bool, what: str) -> None:
        """The old or the new one, whole; the new one if the saving ended."""
        found, lines = directory.last_good(self.root)
        assert found is not None, f"{what}: nothing is left of {names(self.root)}: {lines}"
        value = self.value_of(found)
        assert value in (OLD, NEW), f"{what}: {found} says {value}"
        assert value == NEW or not lived, f"{what}: the old one is found after the new one was saved"
        for path in directory.checkpoints(self.root):  # nothing half-written or half-deleted bears the name
            directory.verify(path)

    def run(self, moments: list[Arm], what: str) -> bool:
        """Save at these moments' mercy in turn, then in peace; whether the last of the former lived."""
        shutil.rmtree(self.root, ignore_errors=True)
        shutil.copytree(self.template, self.root)
        lived = False
        for arm in moments:
            lived = self.attempt(arm)
            self.check(lived, what)
        self.attempt(lambda: None)
        self.check(True, what)
        left = [parse_name(path) for path in self.root.iterdir() if path.name != "latest"]
        assert all(name and name.state is None for name in left), f"{what}: left over: {names(self.root)}"
        assert len(left) == self.keep, f"{what}: keeps {self.keep}, got {names(self.root)}"
        return lived


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def prepared(root: Path, kind: str, scenario: str) -> Trial:
    if kind == "points":
        from tests.checkpoint import helpers

        content = (helpers.write_files, helpers.value_of)
    else:
        content = (write_text_files, text_value_of)
    keep, steps, step = SCENARIOS[scenario]
    trial = Trial(root / "root", root / "template", step, keep, *content)
    for old in steps:
        trial.save(trial.template, old, OLD)
    return trial


def main(root: Path, kind: str, scenario: str, every: int = 1) -> None:
    trial = prepared(root, kind, scenario)
    moments = {}
    if kind == "points":
        for point in POINTS:
            moments[point] = at_point(point)
            assert not trial.run([moments[point]], point), f"{point}: nobody died there"
    else:
        for number in range(1, 1000):
            moments[str(number)] = before_event(number)
            if trial.run([moments[str(number)]], f"event {number}"):
                break
    pairs = list(product(moments, moments))[::every]
    for one, other in pairs:
        trial.run([moments[one], moments[other]], f"{one}, then {other}")
    print(f"{len(moments)} moments, {len(pairs)} pairs")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], *map(int, sys.argv[4:]))
