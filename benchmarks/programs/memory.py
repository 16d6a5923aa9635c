"""Memory of a rank that trains by a plan; the variant is the plan's path, with `,kept` behind it or without.

Reports the bytes by which each rank's process grew, at its peak in training: all memory but pages of files,
which the kernel may drop. What was there before: Python, libraries, MPI, the whole model, the data set.
"""

import importlib
import re
from pathlib import Path

from common import load_job

from hybridpipe.environment.allocator import return_freed_memory
from hybridpipe.training.metrics import MinibatchRecord
from hybridpipe.training.trainer import Trainer

PROCESS = Path("/proc/self")
RESET_PEAK = "5"  # of clear_refs, in proc(5)


def status(*names: str) -> int:
    """Return the sum of entries of /proc/self/status, in bytes."""
    text = (PROCESS / "status").read_text()
    return sum(1024 * int(found) for name in names for found in re.findall(rf"^{name}:\s+(\d+)", text, re.M))


def main() -> None:
    job = load_job()
    model, dataset = job.model(), job.dataset()
    path, _, kept = job.variant.partition(",")
    importlib.import_module("torch._dynamo")  # torch's optimizers do: 80 MB that belong to no stage
    before = status("RssAnon", "RssShmem")
    trainer = Trainer(
        model, loss=job.task.loss, optimizer=job.task.optimizer, plan=path, minibatch_size=job.minibatch
    )
    if not kept:
        return_freed_memory()
    (PROCESS / "clear_refs").write_text(RESET_PEAK)

    def note(record: MinibatchRecord) -> None:
        job.seconds.append(record.seconds)
        job.losses.append(record.loss / job.ranks)

    trainer.fit(dataset, shuffle=False, on_minibatch=note)
    grown = status("VmHWM") - status("RssFile") - before
    job.report(grown=trainer.world.allgather(grown))
    trainer.close()


if __name__ == "__main__":
    main()
