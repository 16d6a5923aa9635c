"""A stand-in for torch.cuda's streams and events on a CPU: work comes late, and memory is reused at once.

A copy into memory of the device, and every copy with `non_blocking`, is queued in the current stream. A look
at an event takes one step of its stream, so that work is done after some looks, and never by itself.
Everything else runs at once: the stream that computes is ahead of its own copies. Queued copies know
addresses only, as a GPU does: memory that was let go of too early holds something else by then.

Ranks are threads. A handle of one is what it stands for, and streams wait for events of other ranks.
"""

import ctypes
import threading
import time
import uuid
import weakref
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hybridpipe.device import GpuLanes

FREE = 0xFF  # what free memory holds: NaN in floating point


class Stream:
    """A queue of work."""

    def __init__(self, cuda: "LateCuda") -> None:
        self.cuda, self.work = cuda, deque[Mark | Wait | Copy]()

    def step(self) -> None:
        """Do one piece of work, or let another stream do one that this one waits for."""
        if self.work and self.work[0]():
            self.work.popleft()

    def wait_event(self, event: "Event") -> None:
        with self.cuda.lock:
            mark = event.mark  # as recorded last; a wait for what was never recorded is none
            if mark is None:
                return
            if self is self.cuda.computing and mark.stream.cuda is self.cuda:
                mark.stream.hurry(mark)  # what it computes next needs the numbers now
            else:
                self.work.append(Wait(mark))

    def hurry(self, mark: "Mark") -> None:
        """Do the copies before a mark for those who wait on the device; hosts learn of them later."""
        for work in list(self.work):
            if work is mark:
                return
            work.hurry()

    def synchronize(self) -> None:
        with self.cuda.lock:
            while self.work:
                self.step()


class Mark:
    """A place in a stream's work."""

    def __init__(self, stream: Stream) -> None:
        self.stream, self.reached = stream, False

    def hurry(self) -> None:
        """Hosts learn of it later."""

    def __call__(self) -> bool:
        self.reached = True
        return True


class Wait:
    """A wait for a place in another stream's work, perhaps of another rank."""

    def __init__(self, mark: Mark) -> None:
        self.mark = mark

    def hurry(self) -> None:
        while not self():
            pass

    def __call__(self) -> bool:
        if not self.mark.reached:
            self.mark.stream.step()
        return self.mark.reached


class Copy:
    """A copy between two addresses."""

    def __init__(self, cuda: "LateCuda", to: Tensor, source: Tensor, snapshot: bool) -> None:
        assert to.is_contiguous() and source.is_contiguous() and to.nbytes == source.nbytes
        self.cuda, self.to, self.num_bytes = cuda, to.data_ptr(), to.nbytes
        self.held = source if snapshot else None
        self.source = source.data_ptr()
        self.seen: bytes | None = None

    def hurry(self) -> None:
        if self.seen is None:
            self.seen = ctypes.string_at(self.source, self.num_bytes)
            ctypes.memmove(self.to, self.seen, self.num_bytes)

    def __call__(self) -> bool:
        if self.seen is not None and ctypes.string_at(self.source, self.num_bytes) != self.seen:
            self.cuda.mistakes.append("memory was written to while a copy read it")
        self.hurry()
        return True


class Event:
    """A point in a stream's work, where it was recorded last."""

    def __init__(self, cuda: "LateCuda") -> None:
        self.cuda, self.mark = cuda, None

    def record(self) -> None:
        with self.cuda.lock:
            self.mark, self.seconds = Mark(self.cuda.current_stream()), time.perf_counter()
            self.mark.stream.work.append(self.mark)

    @property
    def reached(self) -> bool:
        return self.mark.reached

    def query(self) -> bool:
        with self.cuda.lock:
            if not self.reached:
                self.mark.stream.step()
            return self.reached

    def synchronize(self) -> None:
        while not self.query():
            pass

    def elapsed_time(self, end: "Event") -> float:
        assert self.reached and end.reached, "times of work that is not done"
        return 1e3 * (end.seconds - self.seconds)


class LateCuda(TorchFunctionMode):
    """What stands for torch.cuda, and a mode in which a rank's thread runs.

    Args:
        mistakes: found so far.
    """

    lock = threading.RLock()  # of all ranks, which wait for each other's streams

    def __init__(self) -> None:
        super().__init__()
        self.computing = self._current = Stream(self)
        self.mistakes: list[str] = []
        self._free: defaultdict[int, list[np.ndarray]] = defaultdict(list)
        self._blocks: dict[int, tuple[int, Stream, set[Stream]]] = {}  # by address: bytes, owner, users

    def Stream(self, device: torch.device) -> Stream:
        return Stream(self)

    def Event(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Event:
        return Event(self)

    def set_device(self, device: torch.device) -> None:
        """There is one."""

    def current_stream(self, device: torch.device | None = None) -> Stream:
        return self._current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.pop("pin_memory", False):
            return (
                function(*args, **kwargs)
                .view(torch.uint8)
                .fill_(FREE)
                .view(kwargs.get("dtype") or args[0].dtype)
            )
        if function is torch.empty and "device" in kwargs and kwargs.get("dtype") is torch.uint8:
            return self._taken(args[0])
        if function is torch.empty_like and "device" in kwargs:
            return self._taken(args[0].nbytes).view(args[0].dtype).view(args[0].shape)
        if function is Tensor.copy_ and (kwargs.get("non_blocking") or self._is_on_device(args[0])):
            return self._queued(*args[:2], snapshot=not kwargs.get("non_blocking"))
        if function is Tensor.pin_memory:
            return args[0].clone(memory_format=torch.contiguous_format)
        if function is Tensor.is_pinned:
            return False
        return function(*args, **kwargs)

    def _queued(self, to: Tensor, source: Tensor, snapshot: bool) -> Tensor:
        if snapshot:
            source = source.detach().to(to.dtype).clone(memory_format=torch.contiguous_format)
        if to.nbytes:
            with self.lock:
                self._current.work.append(Copy(self, to, source, snapshot))
        return to

    def _taken(self, num_bytes: int) -> Tensor:
        """Return memory that was perhaps used before, as torch's allocator does."""
        free = self._free[num_bytes]
        memory = free.pop() if free else np.empty(num_bytes, np.uint8)
        memory.fill(FREE)
        alias = memory.view()
        self._blocks[memory.ctypes.data] = num_bytes, self._current, set()
        weakref.finalize(alias, self._let_go, memory).atexit = False
        return torch.from_numpy(alias)

    def _let_go(self, memory: np.ndarray) -> None:
        _, owner, users = self._blocks.pop(memory.ctypes.data)
        if owner is not self.computing and self.computing not in users:
            self.mistakes.append("memory of a stream for copies was used by another one, and not recorded")
        memory.fill(FREE)
        self._free[len(memory)].append(memory)

    def block(self, tensor: Tensor) -> tuple[int, Stream, set[Stream]]:
        at = tensor.data_ptr()
        found = (block for begin, block in self._blocks.items() if begin <= at < begin + max(1, block[0]))
        return next(found, (0, self.computing, set()))

    def _is_on_device(self, tensor: Tensor) -> bool:
        return self.block(tensor)[0] > 0


class LateLanes(GpuLanes):
    """The lanes of a GPU that is a CPU: what is on the host is on the device as well."""

    handles: ClassVar[dict[bytes, tuple[Any, ...]]] = {}  # those that no rank has opened yet

    def __init__(self) -> None:
        self.cuda = LateCuda()
        super().__init__(torch.device("cpu"), self.cuda)

    def handle_of(self, *what: Any) -> bytes:
        handle = uuid.uuid4().bytes
        self.handles[handle] = what
        return handle

    def opened(self, handle: bytes) -> tuple[Any, ...]:
        return self.handles.pop(handle)  # opened once, by one rank

    def is_here(self, tensor: Tensor) -> bool:
        return False

    def used(self, tensor: Tensor) -> Tensor:
        self.cuda.block(tensor)[2].add(
            self.cuda.current_stream()
        )  # `record_stream` takes torch's streams only
        return tensor
