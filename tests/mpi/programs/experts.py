"""Under mpirun: split experts over a stage's replicas and compare with one process, in float64.

Usage: experts.py [--recorded] NUM_UPDATES PLAN... with plans such as 2, 1-2 or 2-2; a stage that has replicas
splits its experts. In 2z1 its replicas shard the rest of the update as well.
"""

import argparse
import contextlib
import copy

import torch
from torch import nn

from hybridpipe import Plan, StageSpec, Trainer
from tests.mpi.programs.exactness import OPTIMIZERS, compare

MINIBATCH, MICROBATCH, SAMPLES, SEED = 12, 2, 41, 7  # the last minibatch has 5 samples
WIDTH, EXPERTS = 6, 4
SCHEDULES = {"1f1b": {}, "gpipe": {}, "zero-bubble": {}, "recompute": {"recompute": True}}


class Experts(nn.Module):
    """As models hold them: 3-D weights, called with tokens, indices and weights."""

    def __init__(self):
        super().__init__()
        self.num_experts = EXPERTS
        self.up = nn.Parameter(0.4 * torch.randn(EXPERTS, 2 * WIDTH, WIDTH))
        self.bias = nn.Parameter(0.1 * torch.randn(EXPERTS, 2 * WIDTH))
        self.down = nn.Parameter(0.4 * torch.randn(EXPERTS, WIDTH, 2 * WIDTH))

    def forward(self, tokens, index, weights):
        found = torch.zeros_like(tokens)
        for expert in range(self.num_experts):
            token, choice = torch.where(index == expert)
            if len(token):
                inner = torch.tanh(tokens[token] @ self.up[expert].T + self.bias[expert])
                found = found.index_add(0, token, inner @ self.down[expert].T * weights[token, choice, None])
        return found


class Mixture(nn.Module):
    def __init__(self, k: int):
        super().__init__()
        self.gate, self.experts, self.k = nn.Linear(WIDTH, EXPERTS), Experts(), k

    def forward(self, x):
        weights, index = torch.softmax(self.gate(x), -1).topk(self.k, -1)
        return x + self.experts(x, index, weights / weights.sum(-1, keepdim=True))


class Recorded(nn.Module):
    """Called in its own way, so its forward is recorded."""

    def __init__(self, layers: nn.Sequential):
        super().__init__()
        self.layers = layers

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            x = layer(x) * (1 + i / 10)
        return x


def make_model(recorded: bool) -> nn.Module:
    torch.manual_seed(1)
    layers = nn.Sequential(nn.Linear(5, WIDTH), Mixture(2), Mixture(1), nn.Tanh(), nn.Linear(WIDTH, 3)).double()
    return Recorded(layers) if recorded else layers


def make_data() -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(SAMPLES, 5, generator=generator, dtype=torch.float64)
    return torch.utils.data.TensorDataset(inputs, torch.randint(0, 3, (SAMPLES,), generator=generator))


def reference(optimizer_factory, epochs: int, recorded: bool):
    model, data = make_model(recorded), make_data()
    optimizer, losses = optimizer_factory(model.parameters()), []
    for _ in range(epochs):
        for start in range(0, SAMPLES, MINIBATCH):
            inputs, targets = data[start : start + MINIBATCH]
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            losses.append(loss.item())
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict(), losses


def make_plan(name: str, num_layers: int, schedule: str, **options) -> Plan:
    """2-1 splits the experts of its first stage; 2w-1 leaves them whole; 2z1 shards the rest."""
    stages = name.split("-")
    cuts = [0, 2, 3, 4][: len(stages)] + [num_layers]
    return Plan(
        tuple(
            StageSpec(a, b, int(each[0]), zero=int(each[0] != "1" and "z1" in each), experts="w" not in each)
            for a, b, each in zip(cuts, cuts[1:], stages, strict=False)
        ),
        schedule=schedule,
        num_microbatches=MINIBATCH // MICROBATCH,
        **options,
    )


def make_trainer(model: nn.Module, plan: Plan, optimizer: str, **options) -> Trainer:
    return Trainer(
        model,
        loss=nn.functional.cross_entropy,
        optimizer=OPTIMIZERS[optimizer],
        plan=plan,
        minibatch_size=MINIBATCH,
        seed=SEED,
        clip_grad_norm=0.5,
        expert_plan={("layers.*.experts" if isinstance(model, Recorded) else "*.experts"): "ep_dispatch_experts"},
        **options,
    )


def check(plan: Plan, name: str, recorded: bool, expected, expected_losses, epochs: int) -> None:
    losses: list[float] = []
    with contextlib.closing(make_trainer(make_model(recorded), plan, name)) as trainer:
        trainer.fit(make_data(), epochs, shuffle=False, on_minibatch=lambda record: losses.append(record.loss))
        after = trainer.evaluate(make_data())
        state = trainer.full_state_dict()
        torch.testing.assert_close(losses, expected_losses, rtol=0, atol=1e-10)
        if state is not None:
            within = compare(state, expected)
            print(f"{plan.name} {plan.schedule} {name}: parameters within {within:.1e}", flush=True)
        whole = make_model(recorded)
        whole.load_state_dict(expected)
        expected_after = nn.functional.cross_entropy(whole(make_data()[:][0]), make_data()[:][1]).item()
        assert abs(after["loss"] - expected_after) < 1e-10, (after, expected_after)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--recorded", action="store_true")
    parser.add_argument("updates", type=int)
    parser.add_argument("plans", nargs="+")
    given = parser.parse_args()
    epochs = given.updates // -(-SAMPLES // MINIBATCH)
    for name, factory in OPTIMIZERS.items():
        expected, losses = reference(copy.deepcopy(factory), epochs, given.recorded)
        for plan in given.plans:
            for schedule, options in SCHEDULES.items():
                schedule = "1f1b" if schedule == "recompute" else schedule
                made = make_plan(plan, 6 if given.recorded else 5, schedule, **options)
                check(made, name, given.recorded, expected, losses, epochs)


if __name__ == "__main__":
    main()
