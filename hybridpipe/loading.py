"""Loading: microbatches made before they are asked for, by processes of the rank's own.

torch's DataLoader does the work; what it loads, and in which order, is known from the programs. Not known
here: what a microbatch is made of (`batches`), and who needs it (`Worker.loads`).
"""

import atexit
import signal
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import active_children
from multiprocessing.process import BaseProcess
from typing import Any
from weakref import WeakSet

import torch
from torch.utils.data import DataLoader, Dataset

from hybridpipe.batches import Loaded, Microbatches, minibatches
from hybridpipe.runtime import preemption
from hybridpipe.runtime.stream import Minibatch

At = tuple[int, int]  # a minibatch of the epoch, and a microbatch of it

_processes: WeakSet[BaseProcess] = WeakSet()  # that load


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

    The processes are started as `torch.multiprocessing` is set to, by fork where nothing else was said, keep
    two microbatches each ready, and end with what is returned.
    """
    loader = DataLoader(
        _WithPlace(microbatches),
        batch_size=None,
        sampler=order,
        collate_fn=_as_it_is,
        num_workers=num_workers,
        worker_init_fn=_go_on_when_asked_to_stop,
        generator=torch.Generator(),  # else the process's would be drawn from
    )
    others = set(active_children())
    coming: Iterator[tuple[At, Loaded]] = iter(loader)
    _processes.update(set(active_children()) - others)

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


@atexit.register
def _end() -> None:
    """What the traceback of an error still refers to would be asked to stop, and waited for."""
    for process in _processes:
        process.kill()


def _go_on_when_asked_to_stop(_: int) -> None:
    """Schedulers signal every process of a job; the rank, which needs these, goes on until it has saved."""
    for each in preemption.SIGNALS:
        signal.signal(each, signal.SIG_IGN)
