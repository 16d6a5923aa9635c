"""Whole model: the weights and buffers that ranks begin with, and those of all stages on one rank.

Invariant: every call is collective, and a rank makes numbers of its own stages' tensors only.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from hybridpipe.comm.mpi import MPI
from hybridpipe.model.deferred import Numbers
from hybridpipe.model.layers import Layers
from hybridpipe.model.tensors import overwrite
from hybridpipe.planning.plan import Place, Plan
from hybridpipe.stage.state import shared_tensors

PART_BYTES = 2**30  # larger tensors move in parts, since MPI counts in 32 bits


def begin(
    layers: Layers, plan: Plan, place: Place | None, control: MPI.Comm, numbers: Numbers | None
) -> None:
    """Give the model rank 0's weights and buffers, non-persistent buffers included.

    Args:
        numbers: of the tensors on the meta device, of which the rank gets those of its stages.
    """
    for tensor in shared_tensors(layers.model).values():
        if not tensor.is_meta:
            values = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
            for part in _parts(values):
                control.Bcast([part, MPI.BYTE], 0)
            overwrite(tensor, values)
    if numbers is not None and place is not None:
        spans = [plan.stages[s] for s in plan.held_stages(place)]
        held = [layers.stage(span.start, span.stop).module for span in spans]
        numbers.fill(layers.model, {id(t) for each in held for t in (*each.parameters(), *each.buffers())})


def gathered(
    model: nn.Module, holders: Mapping[str, Sequence[int]], plan: Plan, control: MPI.Comm
) -> dict[str, Tensor] | None:
    """Return the whole model's state on rank 0, on the CPU; None elsewhere.

    Args:
        holders: the stages that hold each key of `model.state_dict()`, of which the first has the values.
    """
    state = {}
    for key, tensor in model.state_dict().items():
        rank = plan.stages[holders[key][0]].ranks[0]
        if control.rank not in (0, rank):
            continue
        if control.rank == rank:
            values = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        else:
            values = torch.empty(tensor.size(), dtype=tensor.dtype)
        for part in _parts(values) if rank != 0 else ():
            if control.rank == rank:
                control.Send([part, MPI.BYTE], 0)
            else:
                control.Recv([part, MPI.BYTE], rank)
        state[key] = values
    return state if control.rank == 0 else None


def _parts(tensor: Tensor) -> list[np.ndarray]:
    """Return a contiguous CPU tensor's bytes in parts of at most PART_BYTES that share its memory."""
    whole = tensor.reshape(-1).view(torch.uint8).numpy()
    return [whole[start : start + PART_BYTES] for start in range(0, len(whole), PART_BYTES)]
