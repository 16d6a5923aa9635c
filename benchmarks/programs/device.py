"""One training on a device, in a precision: a plan of hybridpipe's, or `one`, a plain loop in one process.

Both accumulate the gradients of as many microbatches. The report of rank 0 has the plan's prediction.
Usage: device.py TASK --variant one|PLAN[,SCHEDULE] --device cuda --precision bf16 --out DIR.
"""

import argparse
import sys
import time
from contextlib import nullcontext
from itertools import pairwise

import torch
from common import Job, load_job
from torch import nn

from hybridpipe.device import device_of_rank, lanes_of, peak_memory_bytes
from hybridpipe.planning.plan import Plan, StageSpec
from hybridpipe.training.metrics import MinibatchRecord
from hybridpipe.training.trainer import Trainer


def options() -> argparse.Namespace:
    """Return this program's own options, and leave the others to `load_job`."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--precision", default="bf16")
    own, rest = parser.parse_known_args()
    sys.argv[1:] = rest
    return own


def one_process(job: Job, own: argparse.Namespace) -> None:
    """Train in a plain loop."""
    device = device_of_rank(0, 1, torch.cuda.device_count(), own.device)
    model, lanes = job.model().to(device), lanes_of(device)
    optimizer = job.task.optimizer(model.parameters(), fused=True)
    low = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(own.precision)
    for inputs, targets in job.minibatches():
        optimizer.zero_grad()
        total = torch.zeros((), device=device)
        for x, y in zip(inputs.chunk(job.num_microbatches), targets.chunk(job.num_microbatches)):
            with nullcontext() if low is None else torch.autocast(device.type, low):
                outputs = model(lanes.load(x))
            loss = job.task.loss(outputs.float(), lanes.load(y)) / job.num_microbatches
            loss.backward()
            total += loss.detach()
        optimizer.step()
        job.losses.append(float(total))  # waits for the device, as a plan's losses do
    job.report(plan="one process", memory=peak_memory_bytes(device), parameters=size(model))


def plan(job: Job, model: nn.Sequential) -> Plan:
    """Return the plan of the variant; stages have equally many layers."""
    name, _, schedule = job.variant.partition(",")
    replicas = [int(each) for each in name.split("-")]
    edges = [round(i * len(model) / len(replicas)) for i in range(len(replicas) + 1)]
    stages = [StageSpec(a, b, m) for (a, b), m in zip(pairwise(edges), replicas)]
    return Plan(tuple(stages), schedule or "1f1b", job.num_microbatches)


def under_a_plan(job: Job, own: argparse.Namespace) -> None:
    """Train with hybridpipe, after measuring model and machine for the prediction."""
    model, began = job.model(), time.perf_counter()
    trainer = Trainer(
        model,
        loss=job.task.loss,
        optimizer=job.task.optimizer,
        plan="auto" if job.variant == "auto" else plan(job, model),
        minibatch_size=job.minibatch,
        device=own.device,
        precision=own.precision,
        predict=True,
    )

    def note(record: MinibatchRecord) -> None:
        job.seconds.append(record.seconds)
        job.losses.append(record.loss / job.ranks)

    dataset = job.dataset()
    trainer.prepare(dataset)
    measuring = time.perf_counter() - began
    trainer.fit(dataset, shuffle=False, on_minibatch=note)
    used, summary = trainer.plan, trainer.summary() or {}
    job.report(
        plan=f"{used.name}, {used.schedule}, {used.num_microbatches}",
        predicted=used.predicted and used.predicted.minibatch_seconds,
        memory=peak_memory_bytes(trainer.device),
        measuring=measuring,
        parameters=size(model),
        bubble=summary.get("bubble_fraction"),
    )
    trainer.close()


def size(model: nn.Module) -> int:
    """Return the number of parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


if __name__ == "__main__":
    chosen = options()
    training = load_job()
    (one_process if training.variant == "one" else under_a_plan)(training, chosen)
