"""DeepSpeed's pipeline engine on the CPU, with the cut of the other pipelines."""

import os

import deepspeed
from common import load_job
from deepspeed.pipe import PipelineModule


def main() -> None:
    job = load_job()
    os.environ |= {"RANK": str(job.rank), "WORLD_SIZE": str(job.ranks), "LOCAL_RANK": str(job.rank)}
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)

    class Cut(PipelineModule):
        """A pipeline cut at the given layers; DeepSpeed would count layers or parameters."""

        def _partition_layers(self, method: str = "") -> None:
            self.parts = [0, *job.cuts, len(self._layer_specs)]
            stage = self._topo.get_coord(self.global_rank).pipe
            self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])

    model = Cut(layers=list(job.model()), num_stages=job.ranks, loss_fn=job.task.loss)
    micro = job.minibatch // job.num_microbatches
    config = {
        "train_batch_size": job.minibatch,
        "train_micro_batch_size_per_gpu": micro,
        "steps_per_print": 1 << 30,
    }
    optimizer = job.task.optimizer(p for p in model.parameters() if p.requires_grad)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    for inputs, targets in job.minibatches():
        loss = engine.train_batch(iter(zip(inputs.split(micro), targets.split(micro))))
        job.losses.append(loss.item() / job.ranks)  # the same on every rank
    job.report()


if __name__ == "__main__":
    main()
