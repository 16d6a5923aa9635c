"""Under mpirun: clipping, a learning-rate schedule and no_sync train what one process would, in float64.

Usage: updates.py PLAN... with plans such as 2-1 or, with two stages on each rank, 1-1x2.
"""

import sys
from contextlib import nullcontext
from functools import partial

import torch
from exactness import MICROBATCH, MINIBATCH, OPTIMIZERS, SEED, make_data, make_model, make_plan, seed_all
from torch import nn

from hybridpipe import Trainer

MAX_NORM, ACCUMULATED, NUM_MINIBATCHES = 0.4, 3, 9
SCHEDULERS = {
    "cosine": partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=4),
    "one cycle": partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=12),
}


def minibatches():
    data = make_data()
    starts = [start for _ in range(3) for start in range(0, len(data), MINIBATCH)]
    return [data[start : start + MINIBATCH] for start in starts[:NUM_MINIBATCHES]]


def updates_after(step: int, accumulated: int) -> bool:
    return (step + 1) % accumulated == 0


def reference(optimizer_factory, scheduler_factory, accumulated):
    model = make_model()
    optimizer = optimizer_factory(model.parameters())
    scheduler = scheduler_factory(optimizer)
    clipped = 0
    for step, (inputs, targets) in enumerate(minibatches()):
        for m, first in enumerate(range(0, len(inputs), MICROBATCH)):
            x, y = inputs[first : first + MICROBATCH], targets[first : first + MICROBATCH]
            for i, layer in enumerate(model):
                seed_all(step, m, i)
                x = layer(x)
            (nn.functional.cross_entropy(x, y) * (len(y) / len(targets))).backward()
        if updates_after(step, accumulated):
            clipped += nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM) > MAX_NORM
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    assert clipped
    return model.state_dict()


def check(plan, optimizer: str, scheduler: str, accumulated: int, expected) -> None:
    trainer = Trainer(
        make_model(),
        loss=nn.functional.cross_entropy,
        optimizer=OPTIMIZERS[optimizer],
        plan=plan,
        minibatch_size=MINIBATCH,
        lr_scheduler=SCHEDULERS[scheduler],
        clip_grad_norm=MAX_NORM,
        seed=SEED,
    )
    for step, minibatch in enumerate(minibatches()):
        with nullcontext() if updates_after(step, accumulated) else trainer.no_sync():
            trainer.train_step(*minibatch)
    state = trainer.full_state_dict()
    if state is not None:
        worst = max((state[key] - expected[key]).abs().max().item() for key in expected)
        torch.testing.assert_close(state, dict(expected), rtol=0, atol=1e-10)
        what = f"{plan.name} {plan.schedule} {optimizer} {scheduler}, {accumulated} minibatches an update"
        print(f"{what}: parameters within {worst:.1e}", flush=True)
    trainer.close()


def main() -> None:
    for optimizer, scheduler, accumulated in [("sgd", "one cycle", 1), ("adam", "cosine", ACCUMULATED)]:
        expected = reference(OPTIMIZERS[optimizer], SCHEDULERS[scheduler], accumulated)
        for name in sys.argv[1:]:
            chunked = "x" in name
            for schedule in ["interleaved-1f1b"] if chunked else ["gpipe", "1f1b", "zero-bubble"]:
                check(make_plan(name, schedule), optimizer, scheduler, accumulated, expected)


main()
