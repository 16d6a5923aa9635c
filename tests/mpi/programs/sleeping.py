"""Under mpirun: layers that sleep, so that what a schedule leaves idle does not depend on the cores.

sleeping.py bubbles        one minibatch's idle share under each synchronous schedule, and the formula's
sleeping.py steady PLAN... what each rank waits, as a share of its time, once pipedream's pipeline is full
sleeping.py traced         for each rank what its time went into, and two clocks that say how long it was
"""

import json
import statistics
import sys
import time
from functools import partial

import torch
from torch import Tensor, nn

from hybridpipe import Plan, StageSpec, Trainer
from hybridpipe.planning.schedules.instructions import (
    AllReduce,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    ReceiveActivation,
    ReceiveGradient,
)

UNIT = 0.01  # seconds of a forward, of the inputs' half of a backward and of the weights' half
LAYERS, MICROBATCHES = 8, 8


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(context, value: Tensor, weight: Tensor, seconds: float) -> Tensor:
        context.seconds = seconds
        time.sleep(seconds)
        return value + weight

    @staticmethod
    def backward(context, gradient: Tensor):
        time.sleep(context.seconds)
        return gradient, gradient.sum(), None


class Sleeping(nn.Module):
    """The weights' half of its backward is a hook of its parameter."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.zeros(()))
        self.weight.register_post_accumulate_grad_hook(lambda _: time.sleep(seconds))

    def forward(self, value: Tensor) -> Tensor:
        return Sleep.apply(value, self.weight, self.seconds)


def train(plan: Plan, seconds: float, num_minibatches: int) -> Trainer:
    layers = [Sleeping(seconds) for _ in range(plan.num_layers)]
    size = plan.num_microbatches
    trainer = Trainer(
        nn.Sequential(*layers),
        loss=nn.functional.mse_loss,
        optimizer=partial(torch.optim.SGD, lr=0.01),
        plan=plan,
        minibatch_size=size,
        verbose=False,
    )
    samples = torch.ones(num_minibatches * size, 1)
    trainer.fit(torch.utils.data.TensorDataset(samples, samples))
    return trainer


def cut(replicas: list[int], num_layers: int, **options) -> Plan:
    edges = [i * num_layers // len(replicas) for i in range(len(replicas) + 1)]
    stages = tuple(StageSpec(a, b, m) for a, b, m in zip(edges, edges[1:], replicas, strict=False))
    return Plan(stages, **options)


def bubbles() -> None:
    p, m, v = 4, MICROBATCHES, 2
    fill = p - 1
    expected = {
        "gpipe": fill / (m + fill),
        "1f1b": fill / (m + fill),
        "interleaved-1f1b": fill / (m * v + fill),
        "zero-bubble": fill / (3 * m + fill),  # a third of the fill, which is 3 units a microbatch
    }
    for schedule, share in expected.items():
        chunks = v if schedule == "interleaved-1f1b" else 1
        plan = cut([1] * p * chunks, LAYERS, schedule=schedule, num_microbatches=m, chunks=chunks)
        trainer = train(plan, UNIT * p / LAYERS, num_minibatches=4)
        timeline = trainer.timeline()
        if timeline is not None:
            print(f"{schedule} measured {timeline.bubble_fraction:.3f} formula {share:.3f}", flush=True)
        trainer.close()


def steady(plans: list[str]) -> None:
    computing = Forward | Backward | BackwardInput | BackwardWeight
    waiting = ReceiveActivation | ReceiveGradient | AllReduce
    for name in plans:
        replicas = [int(count) for count in name.split("-")]
        trainer = train(cut(replicas, 2 * len(replicas), schedule="pipedream"), UNIT, num_minibatches=40)
        timeline = trainer.timeline()
        for rank, events in {} if timeline is None else timeline.events.items():
            events = events[len(events) // 3 : -len(events) // 3]  # neither filling nor draining
            length = events[-1].end_seconds - events[0].start_seconds
            waited = sum(event.seconds for event in events if isinstance(event.instruction, waiting))
            computed = sum(event.seconds for event in events if isinstance(event.instruction, computing))
            shares = f"waits {waited / length:.3f} computes {computed / length:.3f}"
            print(f"{name} rank {rank} {shares}", flush=True)
        trainer.close()


def traced() -> None:
    plans = {
        "pipeline": cut([1, 1], 4, num_microbatches=4),
        "replicated": cut([2, 1], 4, num_microbatches=4),
        "asynchronous": cut([2, 1], 4, schedule="pipedream"),
    }
    for name, plan in plans.items():
        trainer = train(plan, UNIT / 2, num_minibatches=16)
        found = trainer.traced()
        if found is not None:
            spans = {
                rank: (events[-1].end_seconds - events[0].start_seconds) / found.ranks[rank].num_minibatches
                for rank, events in found.timeline.events.items()
            }
            means = {rank: statistics.fmean(time.seconds) for rank, time in found.ranks.items()}
            told = {"plan": name, "parts": found.per_minibatch(), "spans": spans, "means": means}
            print(json.dumps(told), flush=True)
        trainer.close()


if sys.argv[1] == "bubbles":
    bubbles()
elif sys.argv[1] == "traced":
    traced()
else:
    steady(sys.argv[2:])
