"""Measures the profile of the task's layers, without training, and writes DIR/profile.json."""

from common import load_job

from hybridpipe.environment.allocator import keep_freed_memory
from hybridpipe.files import write_json
from hybridpipe.measure.layers import measure


def main() -> None:
    job = load_job()
    keep_freed_memory()
    inputs, targets = job.task.samples(job.minibatch // job.num_microbatches).tensors
    profile = measure(job.model(), inputs, targets, job.task.loss, job.task.optimizer)
    job.out.mkdir(parents=True, exist_ok=True)
    write_json(job.out / "profile.json", profile)


if __name__ == "__main__":
    main()
