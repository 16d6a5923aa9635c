"""Machines and model as an earlier start in the same folder has measured them, under the same conditions.

Not known here: how they are measured. Invariant: all ranks use the same measurement, or none.
"""

import hashlib
import os
import platform
import socket
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import torch
from torch import nn

from hybridpipe.checkpoint.directory import make_folder
from hybridpipe.comm.mpi import MPI
from hybridpipe.environment import num_cores
from hybridpipe.errors import UserError
from hybridpipe.files import parse, read_object, write_json
from hybridpipe.notices import notices
from hybridpipe.planning.cluster import Cluster
from hybridpipe.planning.profile import ModelProfile
from hybridpipe.report.words import counted
from hybridpipe.version import __version__

MACHINES = "machines.json"
FORMAT = "hybridpipe-machines/1"


@dataclass(frozen=True)
class MeasuredMachines:
    """A measurement, and what it depends on.

    Args:
        conditions: text by name (`conditions`).
        cluster: the machines, without limits of memory.
        with_sharding: True if what only plans with `zero` need was measured as well.
        profile: the model.
    """

    conditions: dict[str, str]
    cluster: Cluster
    with_sharding: bool = False
    profile: ModelProfile | None = None
    format: str = FORMAT


def conditions(
    world: MPI.Comm,
    device: torch.device,
    model: nn.Module,
    precision: str,
    profile: ModelProfile | None = None,
) -> dict[str, str]:
    """Describe what a measurement depends on, the same on every rank. Collective.

    Besides hosts, launcher, versions and model it is the work that ranks do meanwhile, which slows others
    down.

    Args:
        device: of this rank.
        precision: name of the training's.
        profile: of the model whose layers are that work; rank 0's is described. None: it is not known yet.
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    threads = os.environ.get("OMP_NUM_THREADS", "default")
    mine = f"{socket.gethostname()}: {name}, {num_cores()} cores, {threads} threads"
    held = chain(model.named_parameters(), model.named_buffers())
    tensors = [(name, tuple(each.shape), str(each.dtype)) for name, each in held]
    by_srun = "SLURM_STEP_ID" in os.environ and "OMPI_COMM_WORLD_SIZE" not in os.environ
    software = {"hybridpipe": __version__, "Python": platform.python_version(), "torch": torch.__version__}
    mpi = MPI.Get_library_version().rstrip("\0").splitlines()[0]
    return {
        "ranks": "; ".join(world.allgather(mine)),
        "launcher": "srun" if by_srun else "mpirun",
        "versions": ", ".join([*(f"{name} {version}" for name, version in software.items()), mpi]),
        "model": f"{_digest(tensors)}, {precision}",
        **({} if profile is None else {"work": world.bcast(_work(profile))}),
    }


def _work(profile: ModelProfile) -> str:
    """Describe the layers of a model by what does not change from measurement to measurement."""
    sizes = [(each.name, each.parameter_bytes, each.output_bytes) for each in profile.layers]
    num_bytes = sum(layer.parameter_bytes for layer in profile.layers)
    what = f"{counted(profile.num_layers, 'layer')}, {num_bytes:,} bytes of parameters, {profile.dtype}"
    return f"{what}, {counted(profile.samples, 'sample')}, {_digest(sizes)}"


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


class MachinesFile:
    """The machines.json of a folder, for trainings under some conditions.

    Args:
        folder: of the file.
        now: the conditions (`conditions`).
        with_sharding: a measurement holds what only plans with `zero` need as well.
    """

    def __init__(self, folder: Path, now: dict[str, str], with_sharding: bool) -> None:
        self.path = folder / MACHINES
        self._now, self._with_sharding = now, with_sharding

    def read(self, world: MPI.Comm) -> MeasuredMachines | None:
        """Return what was measured under the same conditions, the same on every rank, else None. Collective.

        A file that cannot be read, or is another version's, is no measurement: it will be written again.
        """
        found: MeasuredMachines | None = None
        if world.rank == 0 and self.path.exists():
            try:
                earlier = parse(MeasuredMachines, read_object(self.path), str(self.path))
            except UserError:
                earlier = None
            if earlier is not None and self._now.items() <= earlier.conditions.items():
                found = earlier if earlier.with_sharding or not self._with_sharding else None
        found = world.bcast(found)
        return found

    def write(self, cluster: Cluster, profile: ModelProfile) -> None:
        """Write a measurement; a line says so if that fails, as only the next start loses by it."""
        try:
            make_folder(self.path.parent)
            machines = replace(cluster, memory_bytes=None)
            write_json(self.path, MeasuredMachines(self._now, machines, self._with_sharding, profile))
        except UserError as error:
            notices.tell(str(error))
