"""Under mpirun: a loss that returns (sum, weight) trains one process's mean over all tokens, in float64.

Usage: weighted.py PLAN... with plans such as 2-1; weighted.py --both, which is refused; weighted.py --empty
POLICY, with a minibatch without a single token.
"""

import math
import sys
from functools import partial

import torch
from torch import nn

from hybridpipe import Plan, StageSpec, Trainer

PAD, CLASSES, TOKENS, MINIBATCH, MAX_NORM = -100, 3, 5, 12, 0.05
SAMPLES = 41  # the last minibatch has 5 samples, its last microbatch 1
ADAM = partial(torch.optim.Adam, lr=0.01)


def of_tokens(outputs, targets):
    total = nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="sum")
    return total, (targets != PAD).sum()


def make_model() -> nn.Sequential:
    torch.manual_seed(1)
    layers = [nn.Embedding(7, 4), nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, CLASSES)]
    return nn.Sequential(*layers).double()


def make_data() -> torch.utils.data.TensorDataset:
    """Sentences of 0 to 5 tokens; in each minibatch the second microbatch is padding only."""
    generator = torch.Generator().manual_seed(2)
    targets = torch.randint(0, CLASSES, (SAMPLES, TOKENS), generator=generator)
    lengths = torch.randint(1, TOKENS + 1, (SAMPLES, 1), generator=generator)
    lengths[torch.arange(SAMPLES) % MINIBATCH // 2 == 1] = 0
    targets[torch.arange(TOKENS) >= lengths] = PAD
    return torch.utils.data.TensorDataset(
        torch.randint(0, 7, (SAMPLES, TOKENS), generator=generator), targets
    )


def make_plan(name: str, schedule: str) -> Plan:
    replicas = [int(count) for count in name.split("-")]
    edges = [round(i * 5 / len(replicas)) for i in range(len(replicas) + 1)]
    stages = tuple(StageSpec(a, b, m) for a, b, m in zip(edges, edges[1:], replicas, strict=False))
    return Plan(stages, schedule, num_microbatches=MINIBATCH // 2)


def mean(model: nn.Module, inputs, targets):
    total, weight = of_tokens(model(inputs), targets)
    return total / weight


def reference(epochs: int):
    """Return the weights, the minibatches' losses, the epochs' losses, and the loss of an evaluation."""
    model, data = make_model(), make_data()
    optimizer, losses, history, clipped = ADAM(model.parameters()), [], [], 0
    for _ in range(epochs):
        sums = weights = 0.0
        for start in range(0, SAMPLES, MINIBATCH):
            inputs, targets = data[start : start + MINIBATCH]
            loss, weight = mean(model, inputs, targets), (targets != PAD).sum().item()
            loss.backward()
            clipped += nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM) > MAX_NORM
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            sums, weights = sums + loss.item() * weight, weights + weight
        history.append(sums / weights)
    assert clipped
    return model.state_dict(), losses, history, mean(model, *data[:]).item()


def make_trainer(plan: Plan, loss=of_tokens, **options) -> Trainer:
    return Trainer(make_model(), loss=loss, optimizer=ADAM, plan=plan, minibatch_size=MINIBATCH, **options)


def check(plan: Plan, epochs: int, expected) -> None:
    parameters, losses, history, evaluated = expected
    trainer, found = make_trainer(plan, clip_grad_norm=MAX_NORM), []
    data = make_data()
    entries = trainer.fit(data, epochs, shuffle=False, on_minibatch=lambda record: found.append(record.loss))
    seen = found, [entry["loss"] for entry in entries], trainer.evaluate(data)["loss"]
    assert all(other == seen for other in trainer.world.allgather(seen)), "ranks report other losses"
    torch.testing.assert_close(seen, (losses, history, evaluated), rtol=0, atol=1e-10)
    state = trainer.full_state_dict()
    if state is not None:
        worst = max((state[key] - parameters[key]).abs().max().item() for key in parameters)
        torch.testing.assert_close(state, dict(parameters), rtol=0, atol=1e-10)
        print(f"{plan.name} {plan.schedule}: parameters within {worst:.1e}", flush=True)
    trainer.close()


def now_this_and_now_that(outputs, targets):
    """Return a pair from one replica of the last stage, and a mean from the other."""
    total, weight = of_tokens(outputs, targets)
    return (total, weight) if RANK == 1 else total / weight.clamp(min=1)


def main() -> None:
    if sys.argv[1] == "--both":
        make_trainer(make_plan("1-2", "1f1b"), now_this_and_now_that).fit(make_data())
    elif sys.argv[1] == "--empty":
        data = make_data()
        data.tensors[1][:MINIBATCH] = PAD
        trainer, losses = make_trainer(make_plan("2-1", "1f1b"), on_nonfinite=sys.argv[2]), []
        trainer.fit(data, shuffle=False, on_minibatch=lambda record: losses.append(record.loss))
        finite = all(p.isfinite().all() for p in trainer.model.parameters())
        assert finite and [math.isnan(loss) for loss in losses] == [True, False, False, False]
        print("the weights are finite", flush=True)
    else:
        expected = reference(epochs=3)
        for name in sys.argv[1:]:
            for schedule in ("1f1b", "zero-bubble"):
                check(make_plan(name, schedule), 3, expected)


if __name__ == "__main__":
    from hybridpipe.comm.mpi import MPI

    RANK = MPI.COMM_WORLD.rank
    main()
