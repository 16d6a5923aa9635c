"""What is exported from a checkpoint of several ranks is the model they hold; other plans start from it."""

import sys
from functools import partial
from pathlib import Path

import torch
from mpi4py import MPI
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from hybridpipe import Plan, StageSpec, Trainer
from hybridpipe.checkpoint.plain import export
from hybridpipe.checkpoint.shard import read_plain


def trainer(*stages: StageSpec, num_microbatches: int = 4) -> Trainer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
    return Trainer(
        model,
        loss=nn.functional.cross_entropy,
        optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        plan=Plan(stages, num_microbatches=num_microbatches),
        minibatch_size=16,
    )


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def main(folder: Path) -> None:
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(48, 4), torch.randint(0, 3, (48,)))
    hybrid = trainer(StageSpec(0, 2, replicas=2), StageSpec(2, 4))
    hybrid.fit(data)
    checkpoint = hybrid.save(folder / "checkpoints")
    held, file = hybrid.full_state_dict(), folder / "model.safetensors"
    hybrid.close()
    if held is not None:
        (told,) = export(checkpoint, file)
        assert "9 tensors" in told, told
        assert same(read_plain(file), held)
    MPI.COMM_WORLD.Barrier()
    straight = trainer(StageSpec(0, 1), StageSpec(1, 3), StageSpec(3, 4), num_microbatches=2)
    straight.resume(file)
    again = straight.full_state_dict()
    straight.close()
    if held is not None and again is not None:
        assert same(again, held)
        print("the same")


main(Path(sys.argv[1]))
