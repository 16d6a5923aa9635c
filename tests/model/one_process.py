"""The reference for recorded models: the user's own forward, microbatch by microbatch, in one process.

It runs no record. Each leaf module's call, and each torch function between leaf modules, draws its own
random numbers, with the key that the n-th call of its name has. Buffers of replicated stages are kept once a
replica.
"""

import copy
import random
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from hybridpipe.model.precision import FP32, Precision
from hybridpipe.model.recording.leaf_modules import leaf_modules_of
from hybridpipe.model.rng import random_key
from hybridpipe.model.tensors import map_tensors

CPU = torch.device("cpu")
LOSS = -1  # the loss's place in random keys


def seed_all(key: int) -> None:
    torch.manual_seed(key), random.seed(key), np.random.seed(key % 2**32)


def arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and the keyword arguments that inputs are."""
    if isinstance(inputs, dict):
        return (), inputs
    return (tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)), {}


def take(tree: Any, start: int, stop: int) -> Any:
    return pytree.tree_map_only(Tensor, lambda leaf: leaf[start:stop].clone(), tree)


def count(tree: Any) -> int:
    return len(pytree.tree_leaves(tree)[0])


class Keyed(TorchFunctionMode):
    """Seeds the generators before each call of a leaf module, and of a function between leaf modules."""

    def __init__(self, model: nn.Module, opened: Collection[str]) -> None:
        super().__init__()
        self.seed: Callable[[int], int]
        self._calls, self._depth = Counter[str](), 0
        self._again = Counter[str]()  # calls that a checkpoint has repeated in the backward
        for path, module in leaf_modules_of(model, opened).items():
            module.register_forward_pre_hook(lambda *_, path=path: self._enter(path), prepend=True)
            module.register_forward_hook(lambda *_: self._leave(), always_call=True)

    def begin(self, seed: Callable[[int], int]) -> None:
        """Begin a microbatch, whose keys `seed` makes of a place."""
        self.seed = seed
        self._calls.clear(), self._again.clear()

    def _enter(self, name: str) -> None:
        if not self._depth:
            self._seed(name)
        self._depth += 1

    def _leave(self) -> None:
        self._depth -= 1

    def _seed(self, name: str) -> None:
        if torch._C._current_graph_task_id() >= 0:  # checkpoints run in the reverse order
            self._again[name] += 1
            number = self._calls[name] - self._again[name]
        else:
            number = self._calls[name]
            self._calls[name] += 1
        seed_all(self.seed(zlib.crc32(f"{name} {number}".encode())))

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        if not self._depth and not name.startswith("_"):
            self._seed(name)
        return function(*args, **(kwargs or {}))


class OneProcess:
    """Trains a copy of a model by plain SGD, as one process would.

    Args:
        opened: paths of modules that are no leaf modules, in a record of the model.
        replicas: number of replicas that have a buffer of their own, by the buffer's name; 1 by default.
        precision, scale: autocast's, and the factor on the loss in a backward.
    """

    def __init__(
        self,
        model: nn.Module,
        opened: Collection[str],
        loss: Callable[[Any, Any], Tensor],
        rate: float,
        seed: int = 0,
        replicas: Mapping[str, int] | None = None,
        precision: Precision = FP32,
        scale: float = 1.0,
    ) -> None:
        self.precision, self.scale = precision, scale
        self.model, self.loss, self.rate, self.seed = copy.deepcopy(model), loss, rate, seed
        self.keyed = Keyed(self.model, opened)
        self.buffers = {
            name: [buffer.clone() for _ in range((replicas or {}).get(name, 1))]
            for name, buffer in self.model.named_buffers()
        }

    def step(self, step: int, inputs: Any, targets: Any, size: int) -> float:
        """Train on one minibatch in microbatches of `size` samples; return its mean loss."""
        total = self.backward(step, inputs, targets, size)
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    gradient = parameter.grad.to_dense() / self.scale
                    parameter.add_(gradient, alpha=-self.rate)  # as SGD does, to the bit
                    parameter.grad = None
        return total

    def backward(self, step: int, inputs: Any, targets: Any, size: int, first: int = 0) -> float:
        """Add up a minibatch's gradients; `first` is the number of microbatches that replicas saw before."""
        whole, total = count(targets), 0.0
        for m, start in enumerate(range(0, whole, size)):
            part, wanted = take(inputs, start, start + size), take(targets, start, start + size)
            self.keyed.begin(lambda place, m=m: random_key(self.seed, step, m, place))
            with self.own_buffers(first + m):
                copies = self.copies()
                with self.keyed, self.precision.context(CPU):
                    outputs = functional_call(self.model, copies, *arguments(part))
                outputs = map_tensors(self.precision.raised, outputs)
                seed_all(random_key(self.seed, step, m, LOSS))
                value = self.loss(outputs, wanted) * (count(wanted) / whole)
                (value * self.scale).backward()
            total += value.item()
        return total

    def copies(self) -> dict[str, Tensor]:
        """Return the weights of linear layers in low precision, if the model is called with such."""
        if not self.precision.lowers_weights:
            return {}
        linear = {path: each for path, each in self.model.named_modules() if type(each) is nn.Linear}
        return {f"{path}.weight": each.weight.to(self.precision.low) for path, each in linear.items()}

    @contextmanager
    def own_buffers(self, microbatch: int) -> Iterator[None]:
        """Let the model have the buffers of the replicas that see this microbatch."""
        for name, held in self.buffers.items():
            owner, attribute = self._owner(name)
            owner._buffers[attribute] = held[microbatch % len(held)]
        yield
        for name, held in self.buffers.items():
            owner, attribute = self._owner(name)
            held[microbatch % len(held)] = owner._buffers[attribute]

    def evaluate(self, batches: Sequence[tuple[Any, Any, int]]) -> float:
        """Return the mean loss over all samples of minibatches (inputs, targets, size of a microbatch)."""
        self.model.eval()
        total = 0.0
        with torch.no_grad(), self.own_buffers(0):
            for inputs, targets, size in batches:
                for start in range(0, count(targets), size):
                    wanted = take(targets, start, start + size)
                    given = arguments(take(inputs, start, start + size))
                    with self.precision.context(CPU):
                        outputs = functional_call(self.model, self.copies(), *given)
                    outputs = map_tensors(self.precision.raised, outputs)
                    total += self.loss(outputs, wanted).item() * count(wanted)
        self.model.train()
        return total / sum(count(targets) for _, targets, _ in batches)

    def parameters(self) -> dict[str, Tensor]:
        """Return the parameters, each under all of its names."""
        named = self.model.named_parameters(remove_duplicate=False)
        return {name: parameter.detach().clone() for name, parameter in named}

    def _owner(self, name: str) -> tuple[nn.Module, str]:
        path, _, attribute = name.rpartition(".")
        return self.model.get_submodule(path), attribute
