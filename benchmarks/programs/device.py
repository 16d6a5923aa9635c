"""One training on a device: the variant is a plan by name (auto, dp, straight), or `one`, a plain loop.

Both accumulate the gradients of as many microbatches; `auto` chooses their size, and the schedule. The report
of rank 0 has the plan's prediction, the parts of each rank's minibatch, and the peak of each rank's memory on
a GPU; none on a CPU, where a process has far more than a small model's stage.
Usage: device.py TASK --variant one|auto|dp|straight --device cuda --precision bf16 --out DIR.
"""

import argparse
import sys
import time
from contextlib import nullcontext

import torch
from common import Job, load_job
from torch import nn

from hybridpipe.device import device_of_rank, lanes_of, peak_memory_bytes
from hybridpipe.training.metrics import MinibatchRecord
from hybridpipe.training.trainer import Trainer


def device_option() -> str:
    """Return this program's own option, and leave the others to `load_job`."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--device", default="cuda")
    own, rest = parser.parse_known_args()
    sys.argv[1:] = rest
    return str(own.device)


def one_process(job: Job, wanted: str) -> None:
    """Train in a plain loop."""
    device = device_of_rank(0, 1, torch.cuda.device_count(), wanted)
    model, lanes = job.model().to(device), lanes_of(device)
    optimizer = job.task.optimizer(model.parameters(), fused=True)
    low = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(job.precision)
    for inputs, targets in job.minibatches():
        optimizer.zero_grad()
        total = torch.zeros((), device=device)
        for x, y in zip(inputs.chunk(job.num_microbatches), targets.chunk(job.num_microbatches)):
            with nullcontext() if low is None else torch.autocast(device.type, low):
                outputs = model(lanes.load(x))
            loss = job.task.loss(outputs, lanes.load(y)) / job.num_microbatches
            loss.backward()
            total += loss.detach()
        optimizer.step()
        job.losses.append(float(total))  # waits for the device, as a plan's losses do
    job.report(plan="one process", memory={"measured": [peak(device)]}, parameters=size(model))


def under_a_plan(job: Job, wanted: str) -> None:
    """Train with hybridpipe, after measuring model and machine for the plan and its prediction."""
    model, began = job.model(), time.perf_counter()
    sized = {"microbatch_size": job.minibatch // job.num_microbatches}
    trainer = Trainer(
        model,
        loss=job.task.loss,
        optimizer=job.task.optimizer,
        plan=job.variant,
        minibatch_size=job.minibatch,
        device=wanted,
        precision=job.precision,
        **({"schedule": "auto"} if job.variant == "auto" else sized),
    )

    def note(record: MinibatchRecord) -> None:
        job.seconds.append(record.seconds)
        job.losses.append(record.loss / job.ranks)

    dataset = job.dataset()
    trainer.prepare(dataset)
    measuring = time.perf_counter() - began
    if trainer.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(trainer.device)  # that of measuring is none of the plan's
    trainer.fit(dataset, shuffle=False, on_minibatch=note)
    peaks = trainer.world.allgather(peak(trainer.device))
    used, traced, summary = trainer.plan, trainer.traced(), trainer.summary() or {}  # None but on rank 0
    job.report(
        plan=f"{used.name}, {used.schedule}, {used.num_microbatches}",
        predicted=summary.get("predicted_minibatch_seconds"),
        measuring=measuring,
        parameters=size(model),
        bubble=summary.get("bubble_fraction"),
        rank_seconds=traced.per_minibatch() if traced else {},
        memory={"measured": peaks, "predicted": summary.get("predicted_memory_bytes")},
    )
    trainer.close()


def peak(device: torch.device) -> int | None:
    """Return the peak of a GPU's memory in bytes; None on a CPU."""
    return peak_memory_bytes(device) if device.type == "cuda" else None


def size(model: nn.Module) -> int:
    """Return the number of parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


if __name__ == "__main__":
    chosen = device_option()
    training = load_job()
    (one_process if training.variant == "one" else under_a_plan)(training, chosen)
