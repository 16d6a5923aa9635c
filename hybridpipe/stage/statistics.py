"""Statistics: what normalisation layers remember of the samples that they were trained on.

Each replica of a stage sees its own samples. Now and then replicas agree: running means and variances become
the mean over the samples that each has seen since they agreed last, and the numbers of batches add up.
Knows one process; how replicas add numbers up is handed in. Invariant: what all have alike stays bit for bit.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

AVERAGED = ("running_mean", "running_var")
COUNTED = ("num_batches_tracked",)


def statistics(module: nn.Module, names: Sequence[str] = (*AVERAGED, *COUNTED)) -> dict[str, Tensor]:
    """The buffers of these names of all normalisation layers, by their path."""
    return {
        f"{path}.{name}" if path else name: getattr(each, name)
        for path, each in module.named_modules(remove_duplicate=False)
        if isinstance(each, nn.modules.batchnorm._NormBase)
        for name in names
        if getattr(each, name) is not None
    }


class Replica(NamedTuple):
    """The statistics of one replica, by name, and the samples that it has seen since the last agreement."""

    tensors: Mapping[str, Tensor]
    num_samples: int


def agreed(
    names: Iterable[str], replicas: Sequence[Replica], agreed_before: Mapping[str, int]
) -> dict[str, Tensor]:
    """The statistics of these names that all replicas have, as they agree on them.

    Args:
        agreed_before: the numbers of batches at the last agreement. Older checkpoints do not say: then the
            first replica's number counts. Statistics that nobody changed are the first replica's, too.
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
            result[name] = torch.full_like(own, before + more)
        elif total and name.rpartition(".")[2] in AVERAGED:
            shift = torch.zeros_like(own, dtype=torch.float64)
            for replica in replicas:
                shift += replica.num_samples * (replica.tensors[name].double() - own.double())
            result[name] = (own.double() + shift / total).to(own.dtype)
    return result


class RunningStatistics:
    """The statistics of the stages that a rank holds.

    Args:
        num_samples: that each stage was trained on since the last agreement; whoever trains counts them.
        num_batches: of each stage, by path, at the last agreement.
    """

    def __init__(self, stages: Iterable[nn.Module]) -> None:
        self._stages = list(stages)
        self.begin_anew()

    def begin_anew(self) -> None:
        """All replicas have the same statistics now."""
        self.num_samples = 0
        counted = (statistics(stage, COUNTED) for stage in self._stages)
        self.num_batches = [{path: int(tensor) for path, tensor in each.items()} for each in counted]

    def agree(self, add_up: Callable[[Tensor], Tensor], of_first: Callable[[Tensor], Tensor]) -> None:
        """Agree with the other replicas. Collective over them.

        Args:
            add_up: the sum of a tensor over the replicas.
            of_first: the first replica's tensor.
        """
        total = int(add_up(torch.tensor(self.num_samples)))
        if not total:
            return
        for stage, before in zip(self._stages, self.num_batches, strict=True):
            for path, buffer in _once(statistics(stage, COUNTED)).items():
                buffer.fill_(before[path] + int(add_up(buffer.cpu() - before[path])))
            for buffer in _once(statistics(stage, AVERAGED)).values():
                own = buffer.detach().to("cpu", torch.float64)
                first = of_first(own)
                buffer.copy_(first + add_up(self.num_samples * (own - first)) / total)
        self.begin_anew()


def _once(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each under one name, though its layer may stand in two places."""
    return dict({id(tensor): (name, tensor) for name, tensor in tensors.items()}.values())
