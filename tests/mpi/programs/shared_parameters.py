"""Under mpirun: parameters that several stages hold train what one process would, in float64.

An embedding tied to the head, and a block in three places that random numbers leave out of most microbatches:
of many updates it has no gradient in some stages, or in none. Copies are compared bit for bit after every
update. Usage: shared_parameters.py PLAN... with plans such as 2-1 or, with two stages on each rank, 1-1x2,
or "auto".
"""

import sys

import torch
from exactness import (
    MICROBATCH,
    MINIBATCH,
    OPTIMIZERS,
    backward,
    compare,
    make_plan,
    make_trainer,
    train_steps,
    updates_after,
)
from torch import nn

from hybridpipe import Trainer
from hybridpipe.engine.rank_state import parameters
from hybridpipe.model.tensors import raw_bytes

CHUNKED = ["interleaved-1f1b", "zb-v", "v-half", "v-min"]
MAX_NORM, ACCUMULATED, NUM_MINIBATCHES, TOKENS = 0.4, 2, 12, 9


class Sometimes(nn.Module):
    """A block that most microbatches pass by."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.register_buffer("scale", torch.tensor(0.7, dtype=torch.float64))

    def forward(self, x):
        return x if torch.rand(()) < 0.85 else x + self.scale * torch.tanh(self.block(x))


def make_model() -> nn.Sequential:
    torch.manual_seed(1)
    shared = Sometimes(nn.Linear(5, 5))
    head = nn.Linear(5, TOKENS, bias=False)
    model = nn.Sequential(
        nn.Embedding(TOKENS, 5), shared, nn.Dropout(0.2), shared, nn.Linear(5, 5), shared, head
    ).double()
    head.weight = model[0].weight
    return model


def minibatches():
    generator = torch.Generator().manual_seed(2)
    sizes = [MINIBATCH, MINIBATCH, 5] * (NUM_MINIBATCHES // 3)
    return [torch.randint(0, TOKENS, (2, size), generator=generator) for size in sizes]


def reference(factory, clip_grad_norm, accumulated):
    model = make_model()
    optimizer, unused, clipped = factory(model.parameters()), 0, 0
    for step, minibatch in enumerate(minibatches()):
        backward(model, step, *minibatch)
        if updates_after(step, accumulated):
            unused += model[1].block.weight.grad is None
            if clip_grad_norm is not None:
                clipped += nn.utils.clip_grad_norm_(model.parameters(), clip_grad_norm) > clip_grad_norm
            optimizer.step()
            optimizer.zero_grad()
    assert unused or accumulated > 1
    assert clipped or clip_grad_norm is None
    return model.state_dict()


def check_copies(trainer: Trainer) -> int:
    """Compare weights and optimizer state of all holders; return the number of copies.

    Where replicas shard the update, no rank has all of a state.
    """
    executor, own, plan = trainer.worker.executor, {}, trainer.plan
    whole = not any(map(plan.zero_of, range(plan.num_stages)))
    for parameter, key in parameters(executor).items():
        state = executor.update.optimizer.state.get(parameter, {}) if whole else {}
        own[key] = [raw_bytes(parameter), *(raw_bytes(torch.as_tensor(each)) for each in state.values())]
    copies = 0
    everybody = [each.items() for each in trainer.world.allgather(own)]
    first: dict = {}
    for key, held in (pair for each in everybody for pair in each):
        assert first.setdefault(key, held) == held, f"the copies of {key} differ"
        copies += first[key] is not held
    return copies


def check(plan, optimizer: str, clip_grad_norm, accumulated: int, expected) -> None:
    size = MICROBATCH if plan == "auto" else None
    options = {"microbatch_size": size, "clip_grad_norm": clip_grad_norm}
    trainer = make_trainer(make_model(), plan, optimizer, **options)
    for _ in train_steps(trainer, minibatches(), accumulated):
        copies = check_copies(trainer)
    plan, state = trainer.plan, trainer.full_state_dict()
    if plan.placement == "v":  # both ends lie on one rank
        assert trainer.model[0].weight not in getattr(trainer.worker.executor.shared, "_groups", {})
    if state is not None:
        assert copies or plan.num_ranks == 1
        what = f"{plan.name} {plan.schedule} {optimizer}, {accumulated} minibatches an update"
        print(f"{what}: parameters within {compare(state, expected):.1e}, {copies} copies equal", flush=True)
    trainer.close()


def main() -> None:
    for optimizer, clip, accumulated in [("sgd", None, 1), ("adam", MAX_NORM, ACCUMULATED)]:
        expected = reference(OPTIMIZERS[optimizer], clip, accumulated)
        for name in sys.argv[1:]:
            if name == "auto":
                check(name, optimizer, clip, accumulated, expected)
                continue
            for schedule in CHUNKED if "x" in name else ["gpipe", "1f1b", "zero-bubble"]:
                check(make_plan(name, schedule), optimizer, clip, accumulated, expected)


main()
