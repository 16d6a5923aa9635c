"""Plain Horovod, for comparison: every rank holds the whole model and a share of each minibatch.

mpirun -n 4 python examples/baseline_horovod.py examples/digits.toml --out runs/horovod
"""

import horovod.torch as hvd
import torch
from baseline_common import Score, gradient_bytes, load_job


def main() -> None:
    job = load_job()
    hvd.init()
    rank, ranks = hvd.rank(), hvd.size()

    torch.manual_seed(job.seed)
    model = job.build_model()
    optimizer = hvd.DistributedOptimizer(
        job.build_optimizer(model.parameters()),
        named_parameters=model.named_parameters(),
        backward_passes_per_step=job.accumulate,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    # To have a state to send, Horovod takes a step with zero gradients here: Adam begins at step 1.
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    torch.manual_seed(job.seed + rank)  # dropout differs between the ranks

    score = Score("horovod", job, rank, ranks, lambda tensor: hvd.allreduce(tensor, op=hvd.Sum))
    for epoch in range(job.epochs):
        model.train()
        score.start_epoch()
        for shares in job.minibatches(epoch, rank, ranks):
            optimizer.zero_grad()
            total = 0.0
            for share in shares:
                loss = share.weight * job.loss(job.outputs(model, share.inputs), share.targets)
                loss.backward()
                total += loss.item()
            optimizer.step()  # waits for the all-reduced means of the gradients
            score.minibatch(total)
        score.end_epoch(epoch, model)
    score.write_summary(gradient_bytes(model))
    hvd.shutdown()


if __name__ == "__main__":
    main()
