"""BatchNorm over k microbatches on k replicas, against one process that runs k microbatches as one batch.

    sync_batchnorm.py MODEL K SCHEDULES PLANS...
    sync_batchnorm.py --resume FOLDER K PLANS...

A stage of m > k replicas has m / k groups, each with running statistics of its own; when used, they are the
groups' mean by samples. The reference keeps one set of statistics for each group.
"""

import contextlib
import sys
from functools import partial
from pathlib import Path

import torch
from torch import nn

from hybridpipe import Checkpointing, Plan, StageSpec, Trainer
from hybridpipe.checkpoint.saved_model import SavedModel, find_checkpoint
from hybridpipe.errors import UserError
from hybridpipe.model.layers import layers_of
from tests.mpi.programs.exactness import compare

MINIBATCH, MICROBATCH, EPOCHS = 12, 2, 2
SCHEDULES = {
    "1f1b": {"schedule": "1f1b"},
    "gpipe": {"schedule": "gpipe"},
    "zero-bubble": {"schedule": "zero-bubble"},
    "recompute": {"recompute": True},
    "recompute-zero-bubble": {"schedule": "zero-bubble", "recompute": True},
    "zero": {"zero": 1},
}


class Residual(nn.Module):
    """A basic block as in torchvision's ResNet."""

    def __init__(self, channels: int, width: int, stride: int = 1, **options) -> None:
        super().__init__()
        norm = partial(nn.BatchNorm2d, width, **options)
        self.conv1, self.bn1 = nn.Conv2d(channels, width, 3, stride, 1, bias=False), norm()
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, 1, 1, bias=False), norm()
        self.relu, self.downsample = nn.ReLU(inplace=True), nn.Identity()
        if stride != 1 or channels != width:
            self.downsample = nn.Sequential(nn.Conv2d(channels, width, 1, stride, bias=False), norm())

    def forward(self, x):
        made = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(made + self.downsample(x))


def resnet(**options) -> nn.Sequential:
    stem = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4, **options), nn.ReLU())
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))
    return nn.Sequential(stem, Residual(4, 4, **options), Residual(4, 8, 2, **options), head)


class Recorded(nn.Module):
    """The same layers, called by a forward of its own."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.stem, self.first, self.second, self.head = layers

    def forward(self, x):
        return self.head(self.second(self.first(self.stem(x))))


class Twice(nn.Module):
    """Norms called twice, never, and in another order than they are held."""

    def __init__(self) -> None:
        super().__init__()
        self.unused, self.last, self.first = (nn.BatchNorm2d(4) for _ in range(3))

    def forward(self, x):
        return self.last(self.first(x) * self.first(x.sin()).tanh())


class Scaled(nn.BatchNorm2d):
    """A norm with a forward of its own, such as timm's."""

    def forward(self, x):
        return 2 * super().forward(x).tanh()


def custom() -> nn.Sequential:
    layers = resnet()
    layers[0][1] = Scaled(4)
    layers[1] = Twice()
    return layers


def dense() -> nn.Sequential:
    """Norms in two and three dimensions, the first one of inputs, which require no gradient."""
    return nn.Sequential(
        nn.Flatten(2),
        nn.Sequential(nn.Flatten(), nn.BatchNorm1d(16, affine=False), nn.Linear(16, 8), nn.Tanh()),
        nn.Sequential(nn.Unflatten(1, (4, 2)), nn.BatchNorm1d(4, momentum=0.3, eps=1e-3), nn.Flatten()),
        nn.Linear(8, 3),
    )


def frozen() -> nn.Sequential:
    """No gradient reaches the stem; the first norm of the next block is in evaluation."""
    layers = resnet()
    layers[0].requires_grad_(False)
    layers[1].bn1.eval()
    return layers


MODELS = {
    "resnet": resnet,
    "recorded": lambda: Recorded(resnet()),
    "cumulative": partial(resnet, momentum=None),
    "untracked": partial(resnet, track_running_stats=False),
    "custom": custom,
    "dense": dense,
    "frozen": frozen,
    "synced": lambda: nn.SyncBatchNorm.convert_sync_batchnorm(resnet()),
}


def make_model(name: str) -> nn.Module:
    torch.manual_seed(1)
    return MODELS[name]().double()


def points(name: str) -> torch.utils.data.TensorDataset:
    """The last minibatch has three microbatches, the last one of a single sample."""
    count = 42 if name == "dense" else 41  # where a norm's only value would be refused
    numbers = torch.Generator().manual_seed(2)
    inputs = torch.randn(count, 1, 4, 4, dtype=torch.float64, generator=numbers)
    return torch.utils.data.TensorDataset(3 + 2 * inputs, torch.arange(count) % 3)


def make_plan(name: str, model: str, k: int, options: dict) -> Plan:
    """Cut in the middle, or before the head if the last stage cannot have a norm."""
    inputs, targets = points(model)[:MICROBATCH]
    num_layers = layers_of(make_model(model), inputs, nn.functional.cross_entropy, targets).num_layers
    replicas = list(map(int, name.split("-")))
    behind = 1 if replicas[-1] % k else num_layers // 2
    cuts = [0, num_layers - behind, num_layers] if len(replicas) > 1 else [0, num_layers]
    stages = [
        StageSpec(a, b, count, zero=options.get("zero", 0) if count > 1 else 0)
        for a, b, count in zip(cuts, cuts[1:], replicas, strict=False)
    ]
    rest = {key: value for key, value in options.items() if key != "zero"}
    return Plan(tuple(stages), num_microbatches=MINIBATCH // MICROBATCH, **rest)


def statistics_of(model: nn.Module, keys: list[str]) -> dict[str, torch.Tensor]:
    return {key: model.state_dict()[key].clone() for key in keys}


def reference(name: str, plan: Plan, k: int, keys_of: list[list[str]], epochs: int = EPOCHS):
    """Train in one process on groups of k microbatches; return the state, the losses and a loss after it."""
    model, data, losses = make_model(name), points(name), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    tracks = [
        [statistics_of(model, keys) for _ in range(stage.replicas // k or 1)]
        for keys, stage in zip(keys_of, plan.stages, strict=True)
    ]
    seen = [[0] * len(each) for each in tracks]
    for start in [*range(0, len(data), MINIBATCH)] * epochs:
        count, total = min(MINIBATCH, len(data) - start), 0.0
        for j, first in enumerate(range(start, start + count, k * MICROBATCH)):
            inputs, targets = data[first : min(first + k * MICROBATCH, start + count)]
            for keys, track, samples in zip(keys_of, tracks, seen, strict=True):
                with torch.no_grad():
                    for key in keys:
                        model.state_dict()[key].copy_(track[j % len(track)][key])
                samples[j % len(track)] += len(targets)
            loss = nn.functional.cross_entropy(model(inputs), targets) * (len(targets) / count)
            loss.backward()
            total += loss.item()
            for keys, track in zip(keys_of, tracks, strict=True):
                track[j % len(track)] = statistics_of(model, keys)
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    state = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    for keys, track, samples in zip(keys_of, tracks, seen, strict=True):
        for key in keys:
            each = [own[key] for own in track]
            if key.endswith("num_batches_tracked"):
                state[key] = sum(each)
            else:
                state[key] = sum(n * own for n, own in zip(samples, each, strict=True)) / sum(samples)
    model.load_state_dict(state)
    model.eval()
    inputs, targets = data[:]
    with torch.no_grad():
        after = nn.functional.cross_entropy(model(inputs), targets).item()
    return state, losses, after


def keys_by_stage(plan: Plan, name: str) -> list[list[str]]:
    """The keys of running statistics in each stage."""
    inputs, targets = points(name)[:MICROBATCH]
    model = make_model(name)
    holders = layers_of(model, inputs, nn.functional.cross_entropy, targets).holders(plan)
    found = [[] for _ in plan.stages]
    for key in model.state_dict():
        if key.rpartition(".")[2] in ("running_mean", "running_var", "num_batches_tracked"):
            found[holders[key][0]].append(key)
    return found


def make_trainer(name: str, plan: Plan, k: int) -> Trainer:
    return Trainer(
        make_model(name),
        loss=nn.functional.cross_entropy,
        optimizer=partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=1e-3),
        plan=plan,
        minibatch_size=MINIBATCH,
        sync_batchnorm=k,
        verbose=False,
    )


def check_resumed(folder: Path, k: int, plans: list[str]) -> None:
    """Train an epoch under each plan, each from the checkpoint of the one before.

    Statistics are exact up to plan 4, which has several groups.
    """
    before: dict[str, torch.Tensor] | None = None
    for number, each in enumerate(plans):
        plan = make_plan(each, "resnet", k, {})
        with contextlib.closing(make_trainer("resnet", plan, k)) as trainer:
            if number:
                trainer.resume(folder)
                trainer.prepare(points("resnet"))
                now = trainer.full_state_dict()
                assert now is None or all(torch.equal(now[key], before[key]) for key in before), each
            trainer.fit(points("resnet"), shuffle=False, checkpoint=Checkpointing(folder))
            before = trainer.full_state_dict()
            if before is None:
                continue
            saved = SavedModel(find_checkpoint(folder)[0])
            assert all(torch.equal(saved.read(key), before[key]) for key in before), each
            expected, *_ = reference("resnet", plan, k, keys_by_stage(plan, "resnet"), number + 1)
            if "4" in plans[: number + 1]:
                expected = {key: expected[key] for key in expected if "running" not in key}
            apart = compare({key: before[key] for key in expected}, expected)
            print(f"{each}: resumed and saved, within {apart:.1e}", flush=True)
    with contextlib.closing(make_trainer("resnet", make_plan("2", "resnet", 1, {}), 1)) as trainer:
        try:
            trainer.resume(folder)
        except UserError as error:
            print(error, flush=True)


def check(name: str, k: int, label: str, plan: Plan) -> None:
    losses: list[float] = []
    with contextlib.closing(make_trainer(name, plan, 1 if name == "synced" else k)) as trainer:
        classes, keys = [type(each) for each in trainer.model.modules()], list(trainer.model.state_dict())
        trainer.fit(points(name), EPOCHS, shuffle=False, on_minibatch=lambda done: losses.append(done.loss))
        own = trainer.full_state_dict()
        state, expected_losses, loss_after = reference(name, plan, k, keys_by_stage(plan, name))
        torch.testing.assert_close(losses, expected_losses, rtol=0, atol=1e-10)
        if own is not None:
            apart = compare(own, state)
            print(f"{plan.name} {label} k = {k}: state within {apart:.1e}", flush=True)
        if name != "untracked":  # whose evaluation looks at its own microbatches
            after = trainer.evaluate(points(name))["loss"]
            assert abs(after - loss_after) < 1e-10, (after, loss_after)
        assert [type(each) for each in trainer.model.modules()] == classes
        assert not any("forward" in vars(each) for each in trainer.model.modules())
        assert list(trainer.model.state_dict()) == keys


def main() -> None:
    if sys.argv[1] == "--resume":
        check_resumed(Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
        return
    name, k, schedules, *plans = sys.argv[1:]
    for plan in plans:
        for label in schedules.split(","):
            made = make_plan(plan, name, int(k), SCHEDULES[label])
            check(name, int(k), label, made)


if __name__ == "__main__":
    main()
