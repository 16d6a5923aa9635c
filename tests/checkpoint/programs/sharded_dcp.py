"""A rank of a PyTorch training that saves by torch.distributed.checkpoint: each rank has rows of the tensors.

    sharded_dcp.py FOLDER RANK RANKS

Tensor `weight` has the numbers 0, 1, … in 5 rows, which two ranks cannot divide equally.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor


def main(folder: Path, rank: int, ranks: int) -> None:
    meeting = f"file://{folder.absolute()}.meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    whole = {"weight": torch.arange(20.0).view(5, 4), "bias": torch.arange(5.0)}
    model = {key: distribute_tensor(tensor, mesh, [Shard(0)]) for key, tensor in whole.items()}
    dcp.save(
        {"model": model, "optimizer": {"weight": {"exp_avg": torch.ones(3)}}, "step": 7}, checkpoint_id=folder
    )
    dist.destroy_process_group()


main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
