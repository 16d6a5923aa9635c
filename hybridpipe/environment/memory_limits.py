"""Memory limits: what a process may still take, by cgroups, Slurm, its own limits and the machine's RAM.

Knows files and variables; no torch, and ranks only as numbers. Invariant: nothing is changed, and a source
that is absent or says nothing is no limit.
"""

import os
import re
import resource
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import NamedTuple

ROOT = Path("/")
UNLIMITED = 2**60  # a cgroup of version 1 without a limit has one near 2^63
RESERVE = 1.15  # times a prediction that a searched plan's rank must have: so far predictions may be wrong
ALIKE = 0.95  # planning for many unlike ranks takes longer, so a difference below this is no difference


class Room(NamedTuple):
    """Memory that some processes have together.

    Args:
        origin: the limit's name, for people.
        num_bytes: bytes that are free; with `with_held`, those that the processes hold already are included.
        sharers: the same word for all processes of a machine that share it; empty: one has it alone.
    """

    origin: str
    num_bytes: int
    sharers: str = ""
    with_held: bool = False


@dataclass(frozen=True, slots=True)
class RankMemory:
    """The memory of one rank: its process's, or on a GPU that of torch's allocator.

    Args:
        held_bytes: what it has that a stage does not use.
        limit_bytes: the most that it may have; None: not limited.
        origin: the limit's name, for people.
    """

    held_bytes: int
    limit_bytes: int | None = None
    origin: str = "no limit"

    @property
    def left_bytes(self) -> int | None:
        """Bytes that it may still take; None: not limited."""
        return None if self.limit_bytes is None else max(0, self.limit_bytes - self.held_bytes)

    @property
    def stage_bytes(self) -> int | None:
        """Bytes that its stage may be predicted to take; None: not limited."""
        return None if self.left_bytes is None else int(self.left_bytes / RESERVE)


def resident_bytes(root: Path = ROOT) -> int:
    """Return this process's resident memory in bytes; 0 on systems without /proc."""
    words = _text(root / "proc/self/statm").split()
    return int(words[1]) * resource.getpagesize() if words else 0


def rooms(root: Path = ROOT, env: Mapping[str, str] = os.environ) -> list[Room]:
    """Return the limits of this process's memory.

    Args:
        root: the folder that holds `proc` and `sys`.
        env: environment variables, of which Slurm's are read.
    """
    return [*_cgroups(root), *_slurm(env), *own_limits(root), *_ram(root)]


def memory_by_rooms(
    rooms: Sequence[Sequence[Room]], held: Sequence[int], machines: Sequence[int]
) -> list[RankMemory]:
    """Return the memory of each rank: the least of its equal shares of the rooms that it has.

    Args:
        rooms: of each rank.
        held: bytes that each rank has.
        machines: of each rank, a number by which machines differ.
    """
    together: dict[tuple[object, ...], list[tuple[int, Room]]] = defaultdict(list)
    for rank, (of_rank, machine) in enumerate(zip(rooms, machines, strict=True)):
        for room in of_rank:
            key = (machine, room.sharers) if room.sharers else (rank, room)
            together[(*key, room.sharers)].append((rank, room))
    found = [RankMemory(each) for each in held]
    for sharers in together.values():
        num_bytes = min(room.num_bytes for _, room in sharers)
        for rank, room in sharers:
            free = num_bytes - (sum(held[other] for other, _ in sharers) if room.with_held else 0)
            limit = max(0, held[rank] + free // len(sharers))
            least = found[rank].limit_bytes
            if least is None or limit < least:
                found[rank] = replace(found[rank], limit_bytes=limit, origin=room.origin)
    return found


def bytes_for_stages(ranks: Sequence[RankMemory]) -> int | tuple[int, ...] | None:
    """Return the bytes that a rank's stage may be predicted to take, one figure if all have the same.

    Figures that hardly differ become the least of them. None: not limited.
    """
    left = [rank.stage_bytes for rank in ranks if rank.stage_bytes is not None]
    if len(left) < len(ranks):
        return None
    level = tuple(min(other for other in left if other >= ALIKE * own) for own in left)
    return level[0] if len(set(level)) == 1 else level


def _cgroups(root: Path) -> Iterator[Room]:
    """Yield the limit of each cgroup that the process is in, the innermost first.

    A container may see its own cgroup under a path that it does not know: what it sees is the mount's root.
    """
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            yield from _hierarchy(root / "sys/fs/cgroup", path, *_VERSION_2)
        elif "memory" in controllers.split(","):
            yield from _hierarchy(root / "sys/fs/cgroup/memory", path, *_VERSION_1)


# Names of the files with the limits and with the usage, and the entry of memory.stat that is no real usage:
# pages of files that were not read lately.
_VERSION_2 = ("memory.max", "memory.high"), "memory.current", "inactive_file"
_VERSION_1 = ("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"


def _hierarchy(mount: Path, path: str, limits: Sequence[str], usage: str, cache: str) -> Iterator[Room]:
    inside = PurePosixPath(path.lstrip("/"))
    for each in (inside, *inside.parents):
        folder = mount / each
        allowed = [int(text) for name in limits if (text := _text(folder / name)).isdecimal()]
        if allowed and min(allowed) < UNLIMITED:
            used = int(_text(folder / usage) or 0)
            unused = re.search(rf"^{cache} (\d+)$", _text(folder / "memory.stat"), re.MULTILINE)
            free = min(allowed) - used + (int(unused[1]) if unused else 0)
            yield Room("cgroup", max(0, free), f"cgroup {folder.stat().st_ino}")


def _slurm(env: Mapping[str, str]) -> Iterator[Room]:
    """Yield what the job was given on this node; 0 is all that there is."""
    node = f"slurm {env.get('SLURMD_NODENAME', '')}"
    if (of_node := _megabytes(env, "SLURM_MEM_PER_NODE")) > 0:
        yield Room("Slurm's --mem", of_node, node, with_held=True)
    if (of_core := _megabytes(env, "SLURM_MEM_PER_CPU")) > 0:
        cores = int(env.get("SLURM_CPUS_PER_TASK", "1"))
        yield Room("Slurm's --mem-per-cpu", of_core * cores, with_held=True)


def _megabytes(env: Mapping[str, str], name: str) -> int:
    text = env.get(name, "")
    return int(text) * 2**20 if text.isdecimal() else 0


def own_limits(root: Path = ROOT) -> Iterator[Room]:
    """Yield the limits that the process has by itself (`ulimit -v`, `ulimit -d`).

    They count what is mapped, touched or not: threads' stacks and freed memory as well.
    """
    limits, status = _text(root / "proc/self/limits"), _text(root / "proc/self/status")
    for origin, name, entry in (
        ("RLIMIT_AS", "Max address space", "VmSize"),
        ("RLIMIT_DATA", "Max data size", "VmData"),
    ):
        limit = re.search(rf"^{name} +(\d+) ", limits, re.MULTILINE)
        used = re.search(rf"^{entry}:\s+(\d+) kB", status, re.MULTILINE)
        if limit and used:
            yield Room(origin, max(0, int(limit[1]) - int(used[1]) * 1024))


def _ram(root: Path) -> Iterator[Room]:
    """Yield the RAM that is free now: others' processes have the rest, whatever the machine has in all."""
    free = re.search(r"^MemAvailable: +(\d+) kB", _text(root / "proc/meminfo"), re.MULTILINE)
    if free:
        yield Room("RAM", int(free[1]) * 1024, "machine")


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
