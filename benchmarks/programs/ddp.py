"""torch's DistributedDataParallel over gloo, every rank with an equal share of each minibatch."""

import torch.distributed as dist
from common import load_job
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    job = load_job()
    dist.init_process_group("gloo", rank=job.rank, world_size=job.ranks)
    model = DistributedDataParallel(job.model())
    optimizer = job.optimizer(model.parameters())
    job.train_on_shares(model, optimizer)
    job.report()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
