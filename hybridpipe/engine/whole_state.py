"""Whole state: a model's weights and buffers, given to every rank and gathered from the stages.

Knows a model and which rank holds what; no training. Invariant: tensors travel in the order of their names.
"""

from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import torch
from torch import Tensor, nn

from hybridpipe.comm.mpi import MPI
from hybridpipe.comm.transport import PART_BYTES
from hybridpipe.model.tensors import overwrite
from hybridpipe.stage.state import shared_tensors


def broadcast(model: nn.Module, control: MPI.Comm) -> None:
    """Give every rank the weights and buffers of rank 0, non-persistent buffers included. Collective.

    Those on the meta device stay as they are.
    """
    for tensor in shared_tensors(model).values():
        if tensor.is_meta:
            continue
        values = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        for part in _parts(values):
            control.Bcast([part, MPI.BYTE], 0)
        overwrite(tensor, values)


def gather(
    model: nn.Module, keys: Iterable[str], ranks: Mapping[str, int], control: MPI.Comm
) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors of the model's state on rank 0, on the CPU, one at a time. Collective.

    Every rank goes through all of them. Rank 0's own are not copied where they are on the CPU.

    Args:
        keys: of the tensors, in the same order on all ranks.
        ranks: the rank that has each tensor of the state.
    """
    state = model.state_dict()
    for key in keys:
        rank, tensor = ranks[key], state[key].detach()
        if control.rank == rank:
            values = tensor.cpu().contiguous()
        elif control.rank == 0:
            values = torch.empty(tensor.size(), dtype=tensor.dtype)
        else:
            continue
        for part in _parts(values) if rank != 0 else ():
            if control.rank == rank:
                control.Send([part, MPI.BYTE], 0)
            else:
                control.Recv([part, MPI.BYTE], rank)
        if control.rank == 0:
            yield key, values


def _parts(tensor: Tensor) -> list[np.ndarray]:
    """Return a contiguous CPU tensor's bytes in parts of at most PART_BYTES that share its memory."""
    whole = tensor.reshape(-1).view(torch.uint8).numpy()
    return [whole[start : start + PART_BYTES] for start in range(0, len(whole), PART_BYTES)]
