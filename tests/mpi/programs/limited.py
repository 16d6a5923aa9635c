"""Under mpirun: trains a model of which a rank has no room for the whole; the kernel keeps the limit.

limited.py SOURCE TRAINED LAYERS WIDTH MIB [FOLDER]
    SOURCE   function: makes the model; meta: the model is on the meta device; folder: so it is, and its
             weights are those of a folder as of Hugging Face
    TRAINED  all; last: all layers but the last are frozen, and have no gradients
    MIB      what a rank may have; "+MIB": beyond what a process has that has trained a small model
Prints each rank's peak.
"""

import json
import resource
import sys
from functools import partial
from pathlib import Path

import torch
from mpi4py import MPI
from safetensors.torch import save_file
from torch import nn

from hybridpipe import Plan, StageSpec, Trainer

WORLD = MPI.COMM_WORLD
MIB = 2**20


def made(layers: int, width: int, trained: str) -> nn.Module:
    torch.manual_seed(0)
    matrices = [nn.Linear(width, width, bias=False) for _ in range(layers)]
    model = nn.Sequential(*(nn.Sequential(matrix, nn.LayerNorm(width, bias=False)) for matrix in matrices))
    model[:-1].requires_grad_(trained == "all")
    return model


def write_folder(folder: Path, layers: int, width: int) -> None:
    """Write layer i as a matrix with i + 1 on its diagonal, one file each."""
    folder.mkdir()
    names = {}
    for i in range(layers):
        name = f"model-{i}.safetensors"
        tensors = {f"{i}.0.weight": torch.eye(width) * (i + 1), f"{i}.1.weight": torch.ones(width)}
        save_file(tensors, folder / name)
        names |= dict.fromkeys(tensors, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def status(name: str) -> int:
    """Return a figure of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def trainer_of(model, layers: int) -> Trainer:
    each = layers // WORLD.size
    stages = tuple(StageSpec(i * each, (i + 1) * each, 1) for i in range(WORLD.size))
    return Trainer(
        model,
        loss=nn.functional.mse_loss,
        optimizer=partial(torch.optim.SGD, lr=0.01),
        plan=Plan(stages, num_microbatches=2),
        minibatch_size=2,
    )


def train(model, layers: int, width: int, folder: Path | None = None) -> None:
    trainer = trainer_of(model, layers)
    if folder is not None:
        trainer.resume(folder)
    inputs, targets = torch.arange(2.0 * width).view(2, width), torch.ones(2, width)
    losses = [trainer.train_step(inputs, targets) for _ in range(2)]
    assert losses[1] < losses[0], losses
    absent = sum(layer[0].weight.is_meta for layer in trainer.model)
    assert absent == layers - layers // WORLD.size, absent
    if folder is not None:
        held = [i for i, layer in enumerate(trainer.model) if not layer[0].weight.is_meta]
        assert all(trainer.model[i][0].weight[0, 0].round() == i + 1 for i in held)
    if summary := trainer.summary():
        print("at start", *(each // MIB for each in summary["start_peak_memory_bytes"]), flush=True)
    trainer.close()


def main(source: str, trained: str, layers: int, width: int, limit: str, folder: str = "") -> None:
    if source == "folder" and WORLD.rank == 0:
        write_folder(Path(folder), layers, width)
    WORLD.barrier()
    absolute = not limit.startswith("+")
    allowed = int(limit) * MIB
    if not absolute:
        train(partial(made, WORLD.size, 8, "all"), WORLD.size, 8)  # whatever the first training brings along
        allowed += status("VmData")
    before = status("VmHWM")
    resource.setrlimit(resource.RLIMIT_DATA, (allowed, allowed))
    make = partial(made, layers, width, trained)
    with torch.device("cpu" if source == "function" else "meta"):
        model = make if source == "function" else make()
    train(model, layers, width, Path(folder) if source == "folder" else None)
    peak, data = status("VmHWM"), status("VmData")
    print(f"peak {peak // MIB} MiB, {(peak - before) // MIB} more; data {data // MIB}", flush=True)


main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), *sys.argv[5:])
