"""hybridpipe, several plans one after the other; the variant is their names, such as 4,1t2-1t2.

The task is a model of TASKS. One measurement of model and machines predicts all plans (`plan = "auto"`). A
stage such as 2e splits its experts over its replicas. Writes DIR/splits.json: for each plan the seconds of
minibatches, and the predicted ones; and the plan that "auto" chooses.
"""

import argparse
import json
import re
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn

from hybridpipe.files import write_json
from hybridpipe.planning.plan import Plan, StageSpec
from hybridpipe.planning.simulator.predict import predict
from hybridpipe.training.trainer import Trainer

FEATURES, CLASSES, MINIBATCH, MICROBATCHES, SEED = 64, 10, 64, 4, 0
MINIBATCHES = 14
PLANS = {
    "tensor_plan": {"*.up": "colwise", "*.down": "rowwise"},
    "expert_plan": {"*.experts": "ep_dispatch_experts"},
}


class Block(nn.Module):
    """An MLP beside a skip connection."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Experts(nn.Module):
    """MLPs in 3-D weights, computed one after the other."""

    def __init__(self, count: int, width: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(count, inner, width) / width**0.5)
        self.down = nn.Parameter(torch.randn(count, width, inner) / inner**0.5)

    def forward(self, tokens: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        made = torch.zeros_like(tokens)
        for expert in range(len(self.up)):
            token, choice = torch.where(index == expert)
            if len(token):
                out = torch.relu(tokens[token] @ self.up[expert].T) @ self.down[expert].T
                made = made.index_add(0, token, out * weights[token, choice, None])
        return made


class Mixture(nn.Module):
    """Each token goes to two experts."""

    def __init__(self, count: int, width: int, inner: int) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(width, count), Experts(count, width, inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, index = self.gate(x).softmax(-1).topk(2)
        return x + self.experts(x, index, weights)


def of_blocks(make: type, *sizes: int, count: int = 4) -> nn.Sequential:
    """Return blocks between two linear layers."""
    width = sizes[-2]
    blocks = (make(*sizes) for _ in range(count))
    return nn.Sequential(nn.Linear(FEATURES, width), *blocks, nn.Linear(width, CLASSES))


TASKS = {
    "tensors": (lambda: of_blocks(Block, 512, 4096), "tensor_plan"),
    "experts": (lambda: of_blocks(Mixture, 8, 256, 1024), "expert_plan"),
}


def plan_of(name: str, num_layers: int) -> Plan:
    """Return the plan of a name, with equally many layers in each stage."""
    stages = []
    groups = name.split("-")
    edges = [round(num_layers * s / len(groups)) for s in range(len(groups) + 1)]
    for (start, stop), group in zip(pairwise(edges), groups, strict=True):
        replicas, tensor, experts = re.fullmatch(r"(\d+)(?:t(\d+))?(e?)", group).groups()
        given = {"tensor": int(tensor or 1), "experts": bool(experts)}
        stages.append(StageSpec(start, stop, int(replicas), **given))
    return Plan(tuple(stages), num_microbatches=MICROBATCHES)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--variant", required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    make, kind = TASKS[options.task]
    torch.manual_seed(SEED)
    count = MINIBATCH * MINIBATCHES
    data = torch.utils.data.TensorDataset(torch.randn(count, FEATURES), torch.randint(0, CLASSES, (count,)))

    def trained(plan: Plan | str, num_minibatches: int) -> tuple[Trainer, list[float]]:
        torch.manual_seed(SEED)
        trainer = Trainer(
            make(),
            loss=nn.functional.cross_entropy,
            optimizer=lambda parameters: torch.optim.SGD(parameters, 0.01),
            plan=plan,
            minibatch_size=MINIBATCH,
            **({"microbatch_size": MINIBATCH // MICROBATCHES} if plan == "auto" else {}),
            **{kind: PLANS[kind]},
        )
        seconds: list[float] = []
        some = torch.utils.data.Subset(data, range(num_minibatches * MINIBATCH))
        trainer.fit(some, shuffle=False, on_minibatch=lambda record: seconds.append(record.seconds))
        return trainer, seconds

    chooser, _ = trained("auto", 1)
    rank, choice = chooser.world.rank, chooser.choice
    found = {"auto": chooser.plan.name, "plans": {}}
    chooser.close()
    for name in options.variant.split(","):
        plan = plan_of(name, choice.profile.num_layers)
        predicted = predict(plan, choice.profile, choice.cluster)[1].minibatch_seconds
        trainer, seconds = trained(plan, MINIBATCHES)
        with closing(trainer):
            found["plans"][name] = {"predicted": predicted, "seconds": seconds}
    if rank == 0:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "splits.json").write_text(json.dumps(found) + "\n")
        for part in ("profile", "cluster"):
            write_json(options.out / f"{part}.json", getattr(choice, part))


if __name__ == "__main__":
    main()
