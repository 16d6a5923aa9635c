"""Under mpirun: clipping, a learning-rate schedule and no_sync train what one process would, in float64.

Usage: updates.py PLAN... with plans as in exactness.py.
"""

import sys
from functools import partial

import torch
from exactness import (
    MINIBATCH,
    OPTIMIZERS,
    backward,
    compare,
    make_data,
    make_model,
    make_plan,
    make_trainer,
    train_steps,
    updates_after,
)
from torch import nn

MAX_NORM, ACCUMULATED, NUM_MINIBATCHES = 0.4, 3, 9
SCHEDULERS = {
    "cosine": partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=4),
    "one cycle": partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=12),
}


def minibatches():
    data = make_data()
    starts = [start for _ in range(3) for start in range(0, len(data), MINIBATCH)]
    return [data[start : start + MINIBATCH] for start in starts[:NUM_MINIBATCHES]]


def reference(optimizer_factory, scheduler_factory, accumulated):
    model = make_model()
    optimizer = optimizer_factory(model.parameters())
    scheduler = scheduler_factory(optimizer)
    clipped = 0
    for step, minibatch in enumerate(minibatches()):
        backward(model, step, *minibatch)
        if updates_after(step, accumulated):
            clipped += nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM) > MAX_NORM
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    assert clipped
    return model.state_dict()


def check(plan, optimizer: str, scheduler: str, accumulated: int, expected) -> None:
    options = {"lr_scheduler": SCHEDULERS[scheduler], "clip_grad_norm": MAX_NORM}
    trainer = make_trainer(make_model(), plan, optimizer, **options)
    for _ in train_steps(trainer, minibatches(), accumulated):
        pass
    state = trainer.full_state_dict()
    if state is not None:
        what = f"{plan.name} {plan.schedule} {optimizer} {scheduler}, {accumulated} minibatches an update"
        print(f"{what}: parameters within {compare(state, expected):.1e}", flush=True)
    trainer.close()


def main() -> None:
    for optimizer, scheduler, accumulated in [("sgd", "one cycle", 1), ("adam", "cosine", ACCUMULATED)]:
        expected = reference(OPTIMIZERS[optimizer], SCHEDULERS[scheduler], accumulated)
        for name in sys.argv[1:]:
            chunked = "x" in name
            for schedule in ["interleaved-1f1b"] if chunked else ["gpipe", "1f1b", "zero-bubble"]:
                check(make_plan(name, schedule), optimizer, scheduler, accumulated, expected)


main()
