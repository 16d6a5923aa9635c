"""Plain Horovod as in its documentation, every rank with an equal share of each minibatch."""

import horovod.torch as hvd
from common import load_job


def main() -> None:
    job = load_job()
    hvd.init()
    model = job.model()
    optimizer = hvd.DistributedOptimizer(
        job.optimizer(model.parameters()), named_parameters=model.named_parameters()
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    job.train_on_shares(model, optimizer)
    job.report()
    hvd.shutdown()


if __name__ == "__main__":
    main()
