"""hybridpipe; the variant is auto, auto-pipedream, dp, 1f1b, pipedream (stages at `cuts`) or a plan's path.

Variants dp-1 and dp-1-scatter shard the update (`StageSpec.zero`), and dp-auto chooses whether to. Under
dp:horovod, dp:mpi and dp:torch that backend sums gradients; dp:auto measures them and chooses. The variants
with auto write DIR/plan.json, profile.json and cluster.json beside the report.
"""

import re
import time
from itertools import pairwise

from common import Job, load_job

from hybridpipe.files import write_json
from hybridpipe.planning.plan import Plan, StageSpec, Variant
from hybridpipe.training.metrics import MinibatchRecord
from hybridpipe.training.trainer import Trainer


def plan(job: Job, num_layers: int) -> Plan | str:
    """Return the plan of the variant. Under `dp` a rank's share is one microbatch, as in DDP and Horovod."""
    if job.variant in ("dp-auto", "dp:auto"):
        return "dp"
    if re.split("[-:]", job.variant)[0] == "dp":
        _, zero, scatter = f"{job.variant.partition(':')[0]}-0-".split("-")[:3]
        way = Variant(zero=int(zero), scatter=scatter == "scatter")
        return Plan.data_parallel(num_layers, job.ranks, job.ranks, "1f1b").running([way])
    if job.variant in ("1f1b", "pipedream"):
        edges = (0, *job.cuts, num_layers)
        stages = tuple(StageSpec(start, stop) for start, stop in pairwise(edges))
        return Plan(stages, job.variant, 1 if job.variant == "pipedream" else job.num_microbatches)
    return "auto" if job.variant.startswith("auto") else job.variant


def main() -> None:
    job = load_job()
    model = job.model()
    chosen = plan(job, len(model))
    trainer = Trainer(
        model,
        loss=job.task.loss,
        optimizer=job.task.optimizer,
        plan=chosen,
        minibatch_size=job.minibatch,
        precision=job.precision,
        sync=job.variant.partition(":")[2] or "auto",
        **options(job) if chosen in ("auto", "dp") else {},
    )

    processor = [time.process_time()]

    def note(record: MinibatchRecord) -> None:
        processor.append(time.process_time())
        job.seconds.append(record.seconds)
        job.losses.append(record.loss / job.ranks)

    trainer.fit(job.dataset(), shuffle=False, on_minibatch=note)
    if trainer.choice is not None and job.rank == 0:
        job.out.mkdir(parents=True, exist_ok=True)
        for name in ("plan", "profile", "cluster"):
            write_json(job.out / f"{name}.json", getattr(trainer.choice, name))
    used = trainer.plan
    traced = trainer.traced()  # on rank 0 only, as the summary
    summary = trainer.summary() or {}
    memory = {name: summary.get(name) for name in ("peak_memory_bytes", "memory_before_bytes")}
    job.report(
        plan=f"{used.name}, {used.schedule}, {used.num_microbatches}",
        sync=used.sync,
        zero=f"zero = {used.zero_of(0)}" + ", reduce-scatter" * used.scatters(0),
        processor=[after - before for before, after in pairwise(processor[:-1])],  # the last come together
        rank_seconds=traced.per_minibatch() if traced else {},
        predicted=summary.get("predicted_minibatch_seconds"),
        **memory,
    )
    trainer.close()


def options(job: Job) -> dict:
    """Return the options of a plan that is searched for: the schedule, or any synchronous one."""
    if job.variant == "dp:auto":
        return {"microbatch_size": job.minibatch // job.ranks}
    if job.variant == "dp-auto":
        return {"zero": "auto", "microbatch_size": job.minibatch // job.ranks}
    return {"schedule": "pipedream" if job.variant == "auto-pipedream" else "auto"}


if __name__ == "__main__":
    main()
