"""CUDA IPC: which ranks of a host read each other's GPU memory themselves, where asked for, after a trial.

Knows plans, hosts and slots; no messages of a training.
Invariant: both ranks of a pair come to one answer, and a trial that fails leaves them able to train.
"""

import math
import os
from collections.abc import Collection, Iterable, Mapping
from functools import cached_property
from itertools import permutations, product
from typing import NamedTuple, cast

import torch
from torch import Tensor

from hybridpipe.comm.idle import machine_leaders
from hybridpipe.comm.mailbox import NOTE_BYTES, ReadSlot, SentSlot, read_note, write_note
from hybridpipe.comm.messages import spec_of, views
from hybridpipe.comm.mpi import MPI
from hybridpipe.device import GpuLanes, Lanes, visible_gpus
from hybridpipe.notices import notices
from hybridpipe.planning.plan import Plan
from hybridpipe.planning.routes import pairs_over
from hybridpipe.planning.shared_parameters import peers_of

WANTED = "HYBRIDPIPE_CUDA_IPC"
TRIAL_BYTES = (64, 2**22)  # of segments for small memory and for large memory of torch's allocator
TRIAL_TURNS = 2  # the second overwrites what was read in the first

Pair = tuple[int, int]  # of ranks, the lower one first


class _Gpu(NamedTuple):
    """A rank's GPU, and the names of those that its process sees."""

    device: torch.device
    seen: tuple[str, ...]


def asked_for(world: MPI.Comm) -> bool:
    """Return True if a rank asks for it. Collective."""
    return bool(world.allreduce(os.environ.get(WANTED, "0") not in ("", "0"), op=MPI.LOR))


def neighbours(plan: Plan, holders: Iterable[Collection[int]]) -> set[Pair]:
    """Return the pairs of ranks that exchange messages under a plan.

    Args:
        holders: the stages that hold each tensor of the model.
    """
    pairs = {
        pair
        for s in range(plan.num_stages - 1)
        for m in range(math.lcm(*plan.replicas[s : s + 2]))
        for pair in pairs_over(plan, s, m)
    }
    for groups in {frozenset(map(plan.group_of, stages)) for stages in holders}:
        for group, other in permutations(groups, 2):
            for rank in plan.stages[group].ranks:
                place = plan.place(rank)
                assert place is not None
                targets = peers_of(plan, place, other).targets
                pairs |= {(rank, target) for target in targets}
    return {_pair(one, other) for one, other in pairs if one != other}


def readers(world: MPI.Comm, lanes: Lanes, pairs: Collection[Pair]) -> frozenset[int]:
    """Return the ranks whose GPUs and this one's read each other's memory, as a trial shows. Collective.

    A line on rank 0 names the pairs that have failed.

    Args:
        pairs: ranks that exchange messages; the same on all ranks. Those of one host are tried.
    """
    gpus = world.allgather(_Gpu(lanes.device, visible_gpus()) if isinstance(lanes, GpuLanes) else None)
    leaders = machine_leaders(world)
    near = {(a, b) for a, b in pairs if gpus[a] and gpus[b] and leaders[a] == leaders[b]}
    if not near:
        return frozenset()
    peers = {peer for pair in near if world.rank in pair for peer in pair} - {world.rank}
    failed: dict[Pair, str] = {}
    for rank, whys in enumerate(world.allgather(_tried(world, lanes, {p: gpus[p] for p in peers}))):
        for peer, why in whys.items():
            failed.setdefault(_pair(rank, peer), why)
    if failed and world.rank == 0:
        told, why = ", ".join(f"{a}-{b}" for a, b in sorted(failed)), failed[min(failed)]
        notices.tell(f"messages between ranks {told} go through pinned memory; CUDA IPC failed: {why}")
    return frozenset(peer for peer in peers if _pair(world.rank, peer) not in failed)


def _tried(world: MPI.Comm, lanes: Lanes, peers: Mapping[int, _Gpu]) -> dict[int, str]:
    """Exchange messages with other ranks through slots; return this rank's errors by rank. Collective."""
    trials = {peer: _PairTrial(lanes, world.rank, peer, gpu) for peer, gpu in peers.items()}
    whys: dict[int, str] = {}
    told = dict.fromkeys(trials, b"")
    turns = [(num_bytes, turn) for num_bytes in TRIAL_BYTES for turn in range(TRIAL_TURNS)]
    for (num_bytes, turn), step in product(turns, (_PairTrial.write, _PairTrial.read, _PairTrial.free)):
        said: dict[int, bytes] = {}
        for peer in told:
            try:
                said[peer] = step(trials[peer], told[peer], num_bytes, turn)
            except Exception as error:  # torch's or the driver's; a rank that says nothing is tried no more
                whys[peer] = f"{type(error).__name__}: {error}".splitlines()[0]
        answers = world.alltoall([said.get(rank) for rank in range(world.size)])
        told = {peer: answers[peer] for peer in said if answers[peer] is not None}
    for trial in trials.values():
        trial.close()
    world.Barrier()  # memory outlives its handles
    return whys


class _PairTrial:
    """Messages between this rank and another one; each step takes what the other's last one has returned.

    Args:
        gpu: the other's.
    """

    def __init__(self, lanes: Lanes, rank: int, peer: int, gpu: _Gpu) -> None:
        self._rank, self._peer, self._gpu, self._lanes = rank, peer, gpu, cast(GpuLanes, lanes)

    @cached_property
    def _slot(self) -> SentSlot:
        return SentSlot(self._lanes)

    @cached_property
    def _other_slot(self) -> ReadSlot:
        return ReadSlot(self._lanes)

    def write(self, _: bytes, num_bytes: int, turn: int) -> bytes:
        """Write a message into a slot, and return its note."""
        if visible_gpus() != self._gpu.seen:
            raise RuntimeError("the two ranks see other GPUs (CUDA_VISIBLE_DEVICES)")
        if not self._lanes.reaches(self._gpu.device):
            raise RuntimeError(f"{self._lanes.device} has no access to {self._gpu.device}")
        numbers = _numbers(num_bytes, self._rank, turn)
        self._slot.write(spec_of([numbers]), [numbers.to(self._lanes.device)])
        note = torch.empty(NOTE_BYTES, dtype=torch.uint8)
        write_note(note, 0, self._slot.handle)
        return note.numpy().tobytes()

    def read(self, note: bytes, num_bytes: int, turn: int) -> bytes:
        """Read the other's message, check it, and return the handle of the event behind it."""
        expected = _numbers(num_bytes, self._peer, turn)
        spec = spec_of([expected])
        _, handle = read_note(torch.frombuffer(bytearray(note), dtype=torch.uint8))
        room, copied = self._other_slot.read(handle, spec.num_bytes)
        (numbers,) = views(self._lanes.copied_in(room, [copied]), spec)
        if not torch.equal(numbers.cpu(), expected):
            raise RuntimeError(f"{num_bytes} bytes arrived wrong")
        return self._other_slot.handle

    def free(self, handle: bytes, _: int, __: int) -> bytes:
        """Free the slot, which the other has read."""
        self._slot.free(handle)
        return b""

    def close(self) -> None:
        """Let go of the other's memory, where it was read, and of its event."""
        for slot in vars(self).keys() & {"_slot", "_other_slot"}:
            getattr(self, slot).close()


def _numbers(num_bytes: int, rank: int, turn: int) -> Tensor:
    return ((torch.arange(num_bytes) + 7 * rank + turn) % 251).to(torch.uint8)


def _pair(a: int, b: int) -> Pair:
    return min(a, b), max(a, b)
