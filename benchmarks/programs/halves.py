"""The ceiling: each rank trains its stage on whole minibatches by itself, without messages.

The inputs of a stage and the gradients of its outputs are computed once.
"""

import torch
from common import load_job
from mpi4py import MPI


def main() -> None:
    job = load_job()
    stages = job.stages(job.model())
    stage, is_last = stages[job.rank], job.rank == len(stages) - 1
    optimizer = job.optimizer(stage.parameters())
    received = job.dataset().tensors[0][: job.minibatch]
    with torch.no_grad():
        for before in stages[: job.rank]:
            received = before(received)
    gradient = torch.full_like(stage(received), 1e-6).detach()
    MPI.COMM_WORLD.Barrier()  # all ranks begin together
    for inputs, targets in job.minibatches():
        optimizer.zero_grad()
        outputs = stage(received.detach().requires_grad_() if job.rank else inputs)
        if is_last:
            job.task.loss(outputs, targets).backward()
        else:
            outputs.backward(gradient)
        optimizer.step()
    job.report()


if __name__ == "__main__":
    main()
