"""Rehearsing: this rank's device, and the model measured on it before there is a plan. Collective."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from hybridpipe.planning.profile import Measurement, ModelProfile
from hybridpipe.runtime.communicators import default_num_threads, ranks_on_host
from hybridpipe.runtime.mpi import MPI
from hybridpipe.runtime.stream import Minibatch
from hybridpipe.runtime.update import UpdateRule
from hybridpipe.stage.measure import Rehearsal
from hybridpipe.stage.stage import Loss
from hybridpipe.together import measure_together


def measured(
    model: nn.Module,
    minibatch: Minibatch,
    loss: Loss,
    device: torch.device,
    rule: UpdateRule,
    world: MPI.Comm,
    smaller_sizes: Sequence[int],
) -> tuple[ModelProfile, Callable[[], object]]:
    """The model's profile on a microbatch, and on parts of it of `smaller_sizes`; and work of the model's.

    Raises:
        RuntimeError: the model failed on it.
    """
    try:
        rehearsal = Rehearsal(model, minibatch.inputs(0), minibatch.targets(0), loss, device)
        measure = partial(rehearsal.measure, rule.optimizer)
        profile = measure_together(world, measure)
        for size in smaller_sizes:
            if size < profile.samples:  # the data may hold no more
                other = measure_together(world, partial(measure, size=size))
                profile = replace(profile, others=(*profile.others, Measurement(other.samples, other.layers)))
    except (TypeError, ValueError) as error:  # the model's own, whose traceback is to be seen
        raise RuntimeError("the first microbatch failed while the model was measured") from error
    return profile, rehearsal.run


def device_and_threads(world: MPI.Comm, device: torch.device | str | None) -> tuple[torch.device, int | None]:
    """This rank's device, and its compute threads (None: the user has set them)."""
    local_rank, local_size = ranks_on_host(world)
    if device is None:
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        device = f"cuda:{local_rank % gpus}" if gpus else "cpu"
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # for pinned memory, and what layers make on "cuda"
    return device, default_num_threads(local_size)
