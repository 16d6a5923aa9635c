"""Profiles of a config's model, for one or several microbatch sizes.

A single process starts no MPI. Under mpirun all ranks measure at once, as they will compute in training.
"""

import os
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn

from hybridpipe import environment
from hybridpipe.cli.data import data_of, first_microbatch
from hybridpipe.config.file import Config
from hybridpipe.environment.allocator import keep_freed_memory
from hybridpipe.errors import UserError
from hybridpipe.measure.layers import measure
from hybridpipe.model.precision import Precision
from hybridpipe.model.sequential import num_layers
from hybridpipe.planning.profile import ModelProfile


def profile_model(config: Config, sizes: Sequence[int] = ()) -> ModelProfile:
    """Measure the config's model on its data, on the CPU; every rank returns the same profile.

    Args:
        sizes: microbatch sizes in samples; by default the config's. The first size gives the profile's own
            figures, the rest are its `others`.

    Raises:
        UserError: the factory makes no model, or the data are missing, refused or fewer samples than a size.
    """
    keep_freed_memory()  # as training does; without it a gradient of 16 MB took twice as long
    model, source, loss = build_model(config), data_of(config), config.loss.build()
    samples = source.num_samples(1)
    if samples is not None and max(sizes, default=0) > samples:
        raise UserError(f"--microbatch: must be at most the data's {samples} samples, got {max(sizes)}")
    microbatch = first_microbatch(config, source, max(sizes, default=None))
    measured = partial(measure, model, *microbatch, loss, config.optimizer.bound(), sizes=sizes)
    return _measuring()(partial(measured, precision=Precision(config.train.precision)))


def build_model(config: Config) -> nn.Module:
    """Build the config's model with weights drawn from the config's seed.

    Raises:
        UserError: it is no `nn.Module`.
    """
    torch.manual_seed(config.train.seed)
    model: nn.Module = config.model.build()
    try:
        num_layers(model)
    except TypeError as error:
        raise UserError(f"{config.model.where}: {error}") from None
    return model


def circumstances(profile: ModelProfile) -> str:
    """Describe the conditions under which a profile was just measured, in one or two lines."""
    num_threads = torch.get_num_threads()
    text = (
        f"{profile.num_layers} layers, microbatches of {', '.join(map(str, profile.sizes))} samples, "
        f"measured by {profile.load} rank(s) of a machine at once, {num_threads} compute thread(s) each"
    )
    if profile.load == 1 and num_threads > 1 and "OMP_NUM_THREADS" not in os.environ:
        text += "\nranks that share a machine get fewer threads: set OMP_NUM_THREADS, or profile under mpirun"
    return text


def _measuring() -> Callable[[Callable[..., ModelProfile]], ModelProfile]:
    """Return a function that runs a measurement: directly without a launcher, else on all ranks at once."""
    if (environment.promised_ranks() or 1) == 1:
        return lambda measured: measured()
    from hybridpipe.comm.idle import measure_together, share_cores
    from hybridpipe.comm.mpi import MPI
    from hybridpipe.health import failure

    failure.install()
    share_cores(MPI.COMM_WORLD)

    def on_every_rank(measured: Callable[..., ModelProfile]) -> ModelProfile:
        with failure.guard():  # else the other ranks would wait for a failed one
            return measure_together(MPI.COMM_WORLD, lambda agree: measured(agree=agree))

    return on_every_rank
