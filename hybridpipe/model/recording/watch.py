"""Watch: what the operators of an event do, seen at torch's dispatcher, below views and inside leaf modules.

Knows operators by their schemas and tags, and no events.
Invariant: the numbers of a model's tensor are copied before the first operator writes to them.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from hybridpipe.model.tensors import tensors_in
from hybridpipe.torch_private import FakeTensor, TorchDispatchMode, disable_current_modes

HIDDEN_WRITES = slice(3, 5)  # running mean and variance among the arguments of batch_norm
TRAINS = 5  # of its arguments: the statistics are updated
NOT_NEEDED = ("aten::embedding_renorm_",)  # before a lookup, whose gradient does not read the weight


def storage_of(tensor: Tensor) -> int:
    """Return a number that tensors have in common which share memory, while they live."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what the operators of one event do.

    Attributes:
        draws: random numbers were drawn.
        reads: Python, or a shape, learnt something from data.
        written: storages that were written to, as `storage` numbers them.
        overwritten: those of them whose earlier numbers a backward may need.
    """

    def __init__(self, kept: Iterable[Tensor]) -> None:
        """Watch operators.

        Args:
            kept: the model's tensors, whose memory and numbers `restore` brings back.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept: dict[int, list[Tensor]] = defaultdict(list)
        self._memory = [(tensor, tensor.data) for tensor in kept]
        for tensor, _ in self._memory:
            self._kept[storage_of(tensor)].append(tensor)
        self._viewed: dict[int, int] = {}  # the storage of a real tensor, by that of a fake view of it
        self._views: list[Tensor] = []  # so that no other storage gets such a number
        self._copies: dict[int, list[Tensor]] = {}
        self.reset()

    def reset(self) -> None:
        """Begin another event."""
        self.draws, self.reads = False, False
        self.written: set[int] = set()
        self.overwritten: set[int] = set()

    def storage(self, tensor: Tensor) -> int:
        """Return a number that tensors have in common which share memory, a fake view with what it views."""
        number = storage_of(tensor)
        return self._viewed.get(number, number)

    def moved(self) -> list[tuple[Tensor, Tensor]]:
        """Return the model's tensors that have other memory now, each with one that has the memory before."""
        return [(each, before) for each, before in self._memory if _place(each) != _place(before)]

    def restore(self) -> None:
        """Bring back the memory and the numbers of the model's tensors."""
        for tensor, before in self.moved():
            tensor.data = before
        with torch.no_grad():
            for storage, copies in self._copies.items():
                for tensor, copy in zip(self._kept[storage], copies, strict=True):
                    if not torch.equal(tensor, copy):
                        tensor.copy_(copy)
        self._copies.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note an operator's effects, and run it."""
        kwargs = kwargs or {}
        self.draws |= torch.Tag.nondeterministic_seeded in func.tags
        self.reads |= _reads(func, args)
        for tensor in tensors_in(_written(func, args, kwargs)):
            self._keep(storage_of(tensor))
            self.written.add(self.storage(tensor))
            if func._schema.name not in NOT_NEEDED:
                self.overwritten.add(self.storage(tensor))
        out = func(*args, **kwargs)
        if func.is_view:
            self._tie(args, out)
        return out

    def _tie(self, args: Any, out: Any) -> None:
        """Note which memory is seen through a fake view of a real tensor, such as a weight."""
        base = next(iter(tensors_in(args)), None)
        if base is None or isinstance(base, FakeTensor):
            return
        for view in tensors_in(out):
            if isinstance(view, FakeTensor):
                self._viewed[storage_of(view)] = storage_of(base)
                self._views.append(view)

    def _keep(self, storage: int) -> None:
        if storage in self._kept and storage not in self._copies:
            with disable_current_modes():  # one of them may make fake tensors
                self._copies[storage] = [tensor.detach().clone() for tensor in self._kept[storage]]


def _place(tensor: Tensor) -> tuple[Any, ...]:
    strided = tensor.layout is torch.strided
    return (storage_of(tensor), tensor.shape, tensor.stride()) if strided else ()


def _reads(func: Any, args: Any) -> bool:
    """Return True if an operator's result shows data to Python; an index of integers does not."""
    if torch.Tag.data_dependent_output in func.tags:
        return True
    by_integers = func._schema.name == "aten::index" and not any(
        index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
    )
    return torch.Tag.dynamic_output_shape in func.tags and not by_integers


def _written(func: Any, args: Any, kwargs: Mapping[str, Any]) -> list[Any]:
    schema = func._schema
    if schema.is_mutable:
        return [
            args[i] if i < len(args) else kwargs.get(argument.name)
            for i, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
    if schema.name.endswith("_batch_norm") and len(args) > TRAINS and args[TRAINS] is True:
        return list(args[HIDDEN_WRITES])  # the schema does not say so
    return []
