"""torch.distributed.pipelining over gloo; the variant is the name of one of its schedules."""

import torch
import torch.distributed as dist
from common import load_job
from torch.distributed import pipelining


def main() -> None:
    job = load_job()
    dist.init_process_group("gloo", rank=job.rank, world_size=job.ranks)
    stages = job.stages(job.model())
    mine = [
        pipelining.PipelineStage(stages[i], i, len(stages), torch.device("cpu"))
        for i in range(job.rank, len(stages), job.ranks)
    ]
    make = getattr(pipelining, job.variant)
    schedule = make(mine if len(stages) > job.ranks else mine[0], job.num_microbatches, loss_fn=job.task.loss)
    parameters = [p for stage in mine for p in stage.submod.parameters()]
    optimizer = job.task.optimizer(iter(parameters))
    is_first, is_last = mine[0].is_first, mine[-1].is_last
    for inputs, targets in job.minibatches():
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        arguments = (inputs,) if is_first else ()
        last = {"target": targets, "losses": losses} if is_last else {}
        schedule.step(*arguments, **last, return_outputs=False)
        optimizer.step()
        job.losses.append(torch.stack(losses).mean().item() if is_last else 0.0)
    job.report()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
