"""Records: all records of one model, found by the inputs' structure and shapes, the mode and the path.

Knows the whole model, on which it records what it has not met.
Invariant: a record that it returns is that of the path which these inputs take.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hybridpipe.model.precision import FP32, Precision
from hybridpipe.model.recording.events import Diverged, Event, Unsplittable, call_arguments, content
from hybridpipe.model.recording.forward import record
from hybridpipe.model.recording.record import Record
from hybridpipe.model.recording.slices import ModelLookup, Slice
from hybridpipe.model.rng import preserved_state
from hybridpipe.torch_private import pytree
from hybridpipe.types import Loss

CPU = torch.device("cpu")
SHARE = 1 / 4  # of the parameters: a larger module hinders the balance; an event takes 5 us (docs/log)
MOST_SHAPES = 512  # of which records are kept
WHOLE = 1.0  # no module is opened for its size


class _Path(NamedTuple):
    record: Record
    guards: Slice


class Records:
    """Records of one model.

    Attributes:
        around: returns a context for each recording.
    """

    around: Callable[[], AbstractContextManager[None]] = nullcontext

    def __init__(
        self,
        model: nn.Module,
        precision: Precision = FP32,
        *,
        share: float = SHARE,
        closed: Collection[str] = (),
        most: int = 8,
    ) -> None:
        """Begin without records.

        Args:
            precision: in which the model is recorded and run.
            share: modules with more than this part of the parameters are opened, in (0, 1]; unless the first
                forward can only be recorded with such modules whole.
            closed: paths of modules that are not opened for their size.
            most: paths that are recorded for one structure and shape of inputs.
        """
        self._model, self.precision, self._share, self._most = model, precision, share, most
        self._closed = closed
        self._lookup = ModelLookup(model)
        self._paths: dict[Hashable, list[_Path]] = defaultdict(list)
        self._numbers: dict[Hashable, set[Hashable]] = defaultdict(set)  # that came with a shape

    def on(self, model: nn.Module) -> "Records":
        """Return these records for a copy of the model."""
        copies = Records(model, self.precision, share=self._share, closed=self._closed, most=self._most)
        for key, paths in self._paths.items():
            copies._paths[key] = [copies._path(path.record) for path in paths]
        return copies

    def clear(self) -> None:
        """Forget all records, since modes, hooks or flags have changed."""
        self._paths.clear()
        self._numbers.clear()

    def find(self, inputs: Any, training: bool, loss: Loss | None = None, targets: Any = None) -> Record:
        """Return the record of these inputs' path; it is made at the first such call.

        Args:
            loss, targets: checked where the record is made, as `record` does.

        Raises:
            Unsplittable: the forward cannot be run in slices, or takes too many paths.
        """
        leaves, spec = pytree.tree_flatten(call_arguments(inputs))
        shapes = str(spec), tuple((t.shape, t.dtype) for t in leaves if isinstance(t, Tensor)), training
        numbers = tuple(content(leaf) for leaf in leaves if not isinstance(leaf, Tensor))
        if len(self._numbers[shapes] | {numbers}) > self._most:
            raise Unsplittable(
                f"inputs of one shape come with more than {self._most} different numbers, each of which is "
                "recorded: pass tensors instead"
            )
        self._numbers[shapes].add(numbers)
        paths = self._paths[*shapes, numbers]
        while len(self._paths) > MOST_SHAPES:
            del self._paths[next(iter(self._paths))]  # the oldest
        reason = ""
        for path in paths:
            try:
                with preserved_state(CPU, python_too=False), self.precision.recording():
                    path.guards.run((), leaves, _seed)
                return path.record
            except Diverged as error:
                reason = str(error)
        if len(paths) >= self._most:
            raise Unsplittable(f"more than {self._most} paths for inputs of one shape: {reason}")
        of_loss = {"loss": loss, "targets": targets, "precision": self.precision}
        made = partial(record, self._model, inputs, training=training, closed=self._closed, **of_loss)
        with self.around():
            found = self._opening(made)
        paths.append(self._path(found))
        return found

    def _opening(self, made: Callable[..., Record]) -> Record:
        """Record with large leaf modules opened; with whole ones if that fails."""
        try:
            return made(share=self._share)
        except Unsplittable:
            if self._share == WHOLE or any(self._paths.values()):  # random keys follow from what is opened
                raise
        found = made(share=WHOLE)
        self._share = WHOLE
        return found

    def _path(self, found: Record) -> _Path:
        return _Path(found, Slice(found, 0, 0, self._lookup))


def _seed(event: Event) -> None:
    torch.default_generator.manual_seed(event.key)  # a guard that depends on it is not recorded
