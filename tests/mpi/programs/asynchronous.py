"""Under mpirun: train asynchronously and compare every parameter with the formulas, in float64.

Usage: asynchronous.py [--rates] [--zero] [--predict] [--muon] PLAN... with plans such as 2-2 or 1-2-1; in
2-2:mpi that backend sums gradients. With --rates there is a scheduler, and delay warm-up where there can be.
With --zero replicas shard the update, in some stages by a reduce-scatter. With --predict weights are
predicted, in two epochs. With --muon matrices are trained by Muon, and the rest by AdamW.
"""

import sys
from functools import partial
from pathlib import Path

import torch
from exactness import MICROBATCH, SEED, Several, chosen, make_trainer
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2] / "engine"))
import asynchronous_reference as reference

from hybridpipe import Plan, StageSpec
from hybridpipe.planning.schedules.registry import ASYNCHRONOUS

COUNT, NUM_MINIBATCHES = 3, 40
PREDICTIONS = {"sgd": "spectrain", "adam": "xpipe"}
RULES = {
    "pipedream": {"schedule": "pipedream"},
    "vertical": {"schedule": "pipedream", "vertical_sync": True},
    "2bw": {"schedule": "pipedream-2bw", "num_microbatches": COUNT},
}
assert {rule["schedule"] for rule in RULES.values()} == {*ASYNCHRONOUS}, "each schedule needs its formula"


def make_model() -> nn.Sequential:
    torch.manual_seed(1)
    layers = [
        nn.Linear(5, 9),
        nn.Tanh(),
        nn.Dropout(0.3),
        nn.Linear(9, 9),
        nn.Dropout(0.2),
        nn.Linear(9, 9),
        nn.ReLU(inplace=True),
        nn.Linear(9, 3),
    ]
    return nn.Sequential(*layers).double()


def make_data(minibatch: int) -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(2)
    samples = NUM_MINIBATCHES * minibatch - 1  # the last minibatch is short
    inputs = torch.randn(samples, 5, generator=generator, dtype=torch.float64)
    return torch.utils.data.TensorDataset(inputs, torch.randint(0, 3, (samples,), generator=generator))


def check(
    plan: str, rule: str, name: str, scheduler=None, warm_up: int = 0, zero: int = 0, prediction: str = "off"
) -> None:
    plan, _, sync = plan.partition(":")
    replicas = [int(count) for count in plan.split("-")]
    edges = [round(i * 8 / len(replicas)) for i in range(len(replicas) + 1)]
    stages = tuple(
        StageSpec(a, b, m, zero=zero, scatter=bool(zero and a == 0))
        for a, b, m in zip(edges, edges[1:], replicas, strict=False)
    )
    plan = Plan(stages, **RULES[rule], sync=sync or None, prediction=prediction)
    epochs = 1 + plan.predicts_weights
    minibatch = MICROBATCH * (COUNT if rule == "2bw" else 1)
    data = make_data(minibatch)
    options = {"lr_scheduler": scheduler, "delay_warm_up": warm_up}
    trainer = make_trainer(make_model(), plan, name, minibatch, **options)
    losses: list[float] = []
    trainer.fit(data, epochs, shuffle=False, on_minibatch=lambda record: losses.append(record.loss))
    state = trainer.full_state_dict()
    assert all(other == losses for other in trainer.world.allgather(losses)), "losses differ between ranks"
    factory = chosen()[name]
    together = (lambda parameters: Several(factory(parameters))) if name == "muon" else factory
    if state is not None:
        cut = [
            [data[i : i + MICROBATCH] for i in range(start, min(start + minibatch, len(data)), MICROBATCH)]
            for start in range(0, len(data), minibatch)
        ]
        expected, expected_losses = reference.train(
            make_model(),
            edges,
            replicas,
            cut * epochs,
            nn.functional.cross_entropy,
            together,
            rule,
            SEED,
            scheduler=scheduler,
            warm_up=warm_up,
            predicts=plan.predicts_weights,
            drained=len(cut),
        )
        torch.testing.assert_close(list(state.values()), expected, rtol=0, atol=1e-10)
        torch.testing.assert_close(losses, expected_losses, rtol=0, atol=1e-10)
        worst = max((a - b).abs().max().item() for a, b in zip(state.values(), expected, strict=True))
        print(f"{plan.name} {rule} {name}: parameters within {worst:.1e}", flush=True)
    trainer.close()


def main() -> None:
    cosine = partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=25)
    rates, zero = "--rates" in sys.argv, int("--zero" in sys.argv)
    for plan in (word for word in sys.argv[1:] if not word.startswith("--")):
        for rule in RULES:
            if rates:
                check(plan, rule, "sgd", cosine, warm_up=0 if rule == "2bw" else 20, zero=zero)
                continue
            for name in chosen():
                if "--predict" not in sys.argv:
                    check(plan, rule, name, zero=zero)
                elif rule != "vertical":
                    check(plan, rule, name, prediction=PREDICTIONS[name])


main()
