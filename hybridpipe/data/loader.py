"""Loader: processes of a rank, run by torch's DataLoader, load microbatches before they are needed.

Not known here: the samples of a microbatch (`batches`), and the programs that need it (`Worker.loads`).
Invariant: microbatches are loaded in the order in which the rank's program uses them.
"""

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from threading import Thread
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from hybridpipe.data.batches import Microbatches, minibatches
from hybridpipe.data.samples import Loaded
from hybridpipe.data.stream import Minibatch
from hybridpipe.health import preemption

At = tuple[int, int]  # index of a minibatch in the epoch, and of a microbatch in it


def loaded(
    microbatches: Microbatches, loads: Callable[[Sequence[int]], Sequence[At]], num_workers: int
) -> Iterator[Minibatch]:
    """Yield all minibatches of an epoch, loaded ahead.

    Args:
        loads: maps the number of microbatches in each minibatch to the microbatches that this rank needs, in
            order.
        num_workers: processes that load ahead; 0: a microbatch is loaded when it is needed.
    """
    order = loads(microbatches.counts) if num_workers else []
    return minibatches(microbatches, _ahead(microbatches, order, num_workers) if order else None)


def _ahead(microbatches: Microbatches, order: Sequence[At], num_workers: int) -> Callable[[int, int], Loaded]:
    """Start the processes, and return a function that takes the microbatches of `order` one by one.

    The processes are forked: a new interpreter would import the user's script, and start MPI, as the same
    rank. Each keeps two microbatches ready. They end when the function is deleted.
    """
    loader = DataLoader(
        _WithPlace(microbatches),
        batch_size=None,
        sampler=order,
        collate_fn=_as_it_is,
        num_workers=num_workers,
        multiprocessing_context="fork",
        worker_init_fn=_end_on_signal_from_rank,
        generator=torch.Generator(),  # by default the DataLoader draws from the process's generator
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
    """Microbatches together with their indices, which `load` checks."""

    def __init__(self, microbatches: Microbatches) -> None:
        self._microbatches = microbatches

    def __getitem__(self, at: At) -> tuple[At, Loaded]:
        return at, self._microbatches[at]


def _as_it_is(values: Any) -> Any:
    """Collate nothing: the default would turn tuples into lists."""
    return values


def _end_on_signal_from_rank(_: int) -> None:
    """End this process on a TERM from its rank only.

    A job scheduler signals every process of a job, but the rank needs its loaders until it has saved. Their
    signals are blocked from the start; a TERM from the rank is recognised by its sender.
    """
    Thread(target=_wait_for_signal_from_rank, daemon=True).start()


def _wait_for_signal_from_rank() -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)
