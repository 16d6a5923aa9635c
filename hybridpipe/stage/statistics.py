"""Statistics: running means, variances and batch counts of normalisation layers, averaged over replicas.

Knows one process; the caller passes in the functions that sum over replicas.
Invariant: statistics that are equal on all replicas stay the same bit for bit.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

AVERAGED = ("running_mean", "running_var")
COUNTED = ("num_batches_tracked",)


def statistics(module: nn.Module, names: Sequence[str] = (*AVERAGED, *COUNTED)) -> dict[str, Tensor]:
    """Return the buffers of these names of all normalisation layers, by their path."""
    return {
        f"{path}.{name}" if path else name: getattr(each, name)
        for path, each in module.named_modules(remove_duplicate=False)
        if isinstance(each, nn.modules.batchnorm._NormBase)
        for name in names
        if getattr(each, name) is not None
    }


class Replica(NamedTuple):
    """The statistics of one replica, by name, and its number of samples since the last averaging."""

    tensors: Mapping[str, Tensor]
    num_samples: int


def agreed(
    names: Iterable[str], replicas: Sequence[Replica], agreed_before: Mapping[str, int], together: int = 1
) -> dict[str, Tensor]:
    """Return the average over replicas of the statistics of these names that all replicas have.

    Means and variances are weighted by each replica's samples, and new batches add up. If no replica has seen
    samples, the first replica's statistics are returned.

    Args:
        agreed_before: the numbers of batches at the last averaging, by name. Older checkpoints lack them; the
            first replica's number is taken then.
        together: replicas that count the same batches, since they normalise them together.
    """
    first = replicas[0].tensors
    total = sum(replica.num_samples for replica in replicas)
    result = {}
    for name in names:
        if not all(name in replica.tensors for replica in replicas):
            continue
        result[name] = own = first[name]
        if name in agreed_before:
            before = agreed_before[name]
            more = sum(int(replica.tensors[name]) - before for replica in replicas)
            result[name] = torch.full_like(own, before + more // together)
        elif total and name.rpartition(".")[2] in AVERAGED:
            shift = torch.zeros_like(own, dtype=torch.float64)
            for replica in replicas:
                shift += replica.num_samples * (replica.tensors[name].double() - own.double())
            result[name] = (own.double() + shift / total).to(own.dtype)
    return result


class RunningStatistics:
    """The running statistics of the stages that a rank holds.

    Args:
        stages: the modules of each stage.
        together: of each stage, replicas that count the same batches (`agreed`).

    Attributes:
        num_samples: number of samples that each stage has trained on since the last averaging; the executor
            counts them.
        num_batches: each stage's numbers of batches at the last averaging, by path.
    """

    def __init__(self, stages: Sequence[nn.Module], together: Sequence[int]) -> None:
        self._stages, self._together = stages, together
        self.begin_anew()

    def begin_anew(self) -> None:
        """Start to count anew: all replicas have the same statistics now."""
        self.num_samples = 0
        counted = (statistics(stage, COUNTED) for stage in self._stages)
        self.num_batches = [{path: int(tensor) for path, tensor in each.items()} for each in counted]

    def agree(self, sum_all: Callable[[Tensor], Tensor], from_first: Callable[[Tensor], Tensor]) -> None:
        """Average the statistics over the stage's replicas, weighted by samples. Collective over them.

        Args:
            sum_all: returns the sum of a tensor over the replicas.
            from_first: returns the first replica's tensor.
        """
        total = int(sum_all(torch.tensor(self.num_samples)))
        if not total:
            return
        for stage, before, together in zip(self._stages, self.num_batches, self._together, strict=True):
            for path, buffer in _once(statistics(stage, COUNTED)).items():
                buffer.fill_(before[path] + int(sum_all(buffer.cpu() - before[path])) // together)
            for buffer in _once(statistics(stage, AVERAGED)).values():
                own = buffer.detach().to("cpu", torch.float64)
                first = from_first(own)
                buffer.copy_(first + sum_all(self.num_samples * (own - first)) / total)
        self.begin_anew()


def _once(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return each tensor under one of its names, since a layer may stand in two places."""
    return dict({id(tensor): (name, tensor) for name, tensor in tensors.items()}.values())
