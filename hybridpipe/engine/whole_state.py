"""Whole state: a model's weights and buffers, given to every rank and gathered from the stages.

Knows a model and which rank holds what; no training. Invariant: tensors travel in the order of their names.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from hybridpipe.comm.mpi import MPI
from hybridpipe.comm.transport import PART_BYTES
from hybridpipe.model.held_part import HeldPart, whole_forms
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
        for piece in _pieces(values):
            control.Bcast([piece, MPI.BYTE], 0)
        overwrite(tensor, values)


def gather(
    model: nn.Module,
    keys: Iterable[str],
    ranks: Mapping[str, Sequence[int]],
    split: Mapping[str, HeldPart],
    control: MPI.Comm,
) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors of the model's state on rank 0, on the CPU, one at a time. Collective.

    Every rank goes through all of them. Rank 0's own are not copied where they are whole and on the CPU.

    Args:
        keys: of the tensors, in the same order on all ranks.
        ranks: the rank that has each tensor of the state, or those that have its parts, in their order.
        split: one part of each tensor that ranks have in parts.
    """
    forms, state = whole_forms(model), model.state_dict(keep_vars=True)
    for key in keys:
        holders, own, part = ranks[key], state[key].detach(), split.get(key)
        if part is None:
            whole = _moved(own, forms[key].shape, holders[0], control)
        else:
            whole = _joined(own, part.all_parts, holders, control)
        if whole is not None:
            yield key, whole


def _joined(own: Tensor, parts: list[HeldPart], ranks: Sequence[int], control: MPI.Comm) -> Tensor | None:
    """Return on rank 0 the tensor of which ranks have a part each; None elsewhere. Collective."""
    whole = torch.empty(parts[0].whole, dtype=own.dtype) if control.rank == 0 else None
    for part, rank in zip(parts, ranks, strict=True):
        values = _moved(own, part.shape, rank, control)
        if whole is not None and values is not None:
            part.put(whole, values)
    return whole


def _moved(own: Tensor, shape: torch.Size, rank: int, control: MPI.Comm) -> Tensor | None:
    """Return a rank's tensor on rank 0; None elsewhere. Collective over both."""
    if control.rank == rank:
        values = own.cpu().contiguous()
    elif control.rank == 0:
        values = torch.empty(shape, dtype=own.dtype)
    else:
        return None
    for piece in _pieces(values) if rank != 0 else ():
        if control.rank == rank:
            control.Send([piece, MPI.BYTE], 0)
        else:
            control.Recv([piece, MPI.BYTE], rank)
    return values if control.rank == 0 else None


def _pieces(tensor: Tensor) -> list[np.ndarray]:
    """Return a contiguous CPU tensor's bytes in pieces of at most PART_BYTES that share its memory."""
    whole = tensor.reshape(-1).view(torch.uint8).numpy()
    return [whole[start : start + PART_BYTES] for start in range(0, len(whole), PART_BYTES)]
