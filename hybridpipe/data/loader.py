"""Loading: microbatches made before they are asked for, by processes of the rank's own.

torch's DataLoader does the work; what it loads, and in which order, is known from the programs. Not known
here: what a microbatch is made of (`batches`), and who needs it (`Worker.loads`).
"""

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from threading import Thread
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from hybridpipe.data.batches import Loaded, Microbatches, minibatches
from hybridpipe.data.stream import Minibatch
from hybridpipe.health import preemption

At = tuple[int, int]  # a minibatch of the epoch, and a microbatch of it


def loaded(
    microbatches: Microbatches, loads: Callable[[Sequence[int]], Sequence[At]], num_workers: int
) -> Iterator[Minibatch]:
    """All minibatches of an epoch.

    Args:
        loads: what this rank loads of them, in order, from the number of microbatches of each.
        num_workers: processes that load ahead; 0: what is asked for is loaded then.
    """
    order = loads(microbatches.counts) if num_workers else []
    return minibatches(microbatches, _ahead(microbatches, order, num_workers) if order else None)


def _ahead(microbatches: Microbatches, order: Sequence[At], num_workers: int) -> Callable[[int, int], Loaded]:
    """The microbatches of `order`, asked for one by one.

    The processes are forked (a new interpreter would import the user's script, and start MPI, as the same
    rank), keep two microbatches each ready, and end with what is returned.
    """
    loader = DataLoader(
        _WithPlace(microbatches),
        batch_size=None,
        sampler=order,
        collate_fn=_as_it_is,
        num_workers=num_workers,
        multiprocessing_context="fork",
        worker_init_fn=_leave_when_the_rank_asks,
        generator=torch.Generator(),  # else the process's would be drawn from
    )
    before = signal.pthread_sigmask(signal.SIG_BLOCK, preemption.SIGNALS)
    try:
        coming: Iterator[tuple[At, Loaded]] = iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def load(minibatch: int, microbatch: int) -> Loaded:
        at, values = next(coming)
        assert at == (minibatch, microbatch), f"microbatch {at} was loaded, {minibatch, microbatch} is due"
        return values

    return load


class _WithPlace(Dataset[tuple[At, Loaded]]):
    """So that a microbatch says which it is."""

    def __init__(self, microbatches: Microbatches) -> None:
        self._microbatches = microbatches

    def __getitem__(self, at: At) -> tuple[At, Loaded]:
        return at, self._microbatches[at]


def _as_it_is(values: Any) -> Any:
    """By default tuples would become lists."""
    return values


def _leave_when_the_rank_asks(_: int) -> None:
    """Schedulers ask every process of a job to stop; the rank, which needs these, goes on until it has saved.

    What they ask with is blocked in here from the start; the rank's own TERM is told by its sender.
    """
    Thread(target=_wait_for_the_rank, daemon=True).start()


def _wait_for_the_rank() -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)
