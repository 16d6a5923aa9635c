"""Plain PyTorch DDP over gloo, for comparison; otherwise equal to baseline_horovod.py.

    mpirun -n 4 python examples/baseline_ddp.py examples/digits.toml --out runs/ddp

On several hosts, set MASTER_ADDR to the host of rank 0.
"""

import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from baseline_common import Score, gradient_bytes, load_job
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

# Variables for rank and number of ranks of torchrun, Open MPI, MPICH (also srun --mpi=pmi2) and srun.
LAUNCHERS = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
)


def rank_and_ranks() -> tuple[int, int]:
    """Return this process's rank and the number of ranks, from the launcher's variables."""
    for rank, ranks in LAUNCHERS:
        if rank in os.environ and ranks in os.environ:
            return int(os.environ[rank]), int(os.environ[ranks])
    return 0, 1  # started without a launcher


def total_over_ranks(tensor: Tensor) -> Tensor:
    """Return the sum over all ranks, in place. Collective."""
    dist.all_reduce(tensor)
    return tensor


def main() -> None:
    job = load_job()
    rank, ranks = rank_and_ranks()
    address, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), os.environ.get("MASTER_PORT", "29500")
    dist.init_process_group("gloo", init_method=f"tcp://{address}:{port}", rank=rank, world_size=ranks)

    torch.manual_seed(job.seed)
    model = DistributedDataParallel(job.build_model())  # sends rank 0's parameters to all
    optimizer = job.build_optimizer(model.parameters())
    torch.manual_seed(job.seed + rank)  # dropout differs between the ranks

    score = Score("ddp", job, rank, ranks, total_over_ranks)
    for epoch in range(job.epochs):
        model.train()
        score.start_epoch()
        for shares in job.minibatches(epoch, rank, ranks):
            optimizer.zero_grad()
            total = 0.0
            for share in shares:
                # Gradients add up on each rank; the last share's backward all-reduces them.
                with nullcontext() if share is shares[-1] else model.no_sync():
                    loss = share.weight * job.loss(job.outputs(model, share.inputs), share.targets)
                    loss.backward()
                total += loss.item()
            optimizer.step()
            score.minibatch(total)
        # Without DDP, which communicates in forwards, too: ranks may evaluate different numbers of batches.
        score.end_epoch(epoch, model.module)
    score.write_summary(gradient_bytes(model))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
