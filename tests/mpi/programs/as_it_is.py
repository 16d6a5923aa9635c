"""Under mpirun on two ranks: the model is what it is when it is used, and trains as one process would.

Prints a line for each story that holds, in float64; each was trained otherwise, or failed, without a word.
"""

import copy
from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.utils.data import TensorDataset

from hybridpipe import Plan, StageSpec, Trainer
from hybridpipe.comm.mpi import MPI

F = nn.functional
MINIBATCH, WIDTH = 12, 6
RANK = MPI.COMM_WORLD.rank
torch.set_default_dtype(torch.float64)
decaying = partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01)


def data(samples: int = 29) -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(samples, WIDTH, generator=generator)
    return TensorDataset(inputs, torch.randint(0, 4, (samples,), generator=generator))


def tokens(samples: int = 29) -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    return TensorDataset(torch.randint(0, 50, (samples, 3), generator=generator), data(samples).tensors[1])


def plan(name: str, num_layers: int, schedule: str = "1f1b") -> Plan:
    one = StageSpec(0, num_layers, 2)
    two = StageSpec(0, 1), StageSpec(1, num_layers)
    count = 1 if schedule == "pipedream" else 4
    return Plan((one,) if name == "2" else two, schedule=schedule, num_microbatches=count)


def mlp() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 4))


class Loop:
    """Plain PyTorch, one process."""

    def __init__(self, model: nn.Sequential, optimizer, dataset: TensorDataset) -> None:
        self.model, self.dataset = model, dataset
        self.optimizer = optimizer(model.parameters())

    def fit(self) -> None:
        inputs, targets = self.dataset.tensors
        for start in range(0, len(targets), MINIBATCH):
            part = slice(start, start + MINIBATCH)
            self.optimizer.zero_grad()
            F.cross_entropy(self.model(inputs[part]), targets[part]).backward()
            self.optimizer.step()


def check(
    story: str,
    make: Callable[[], nn.Sequential],
    name: str,
    *changes: Callable[[nn.Sequential], object],
    optimizer=decaying,
    dataset: TensorDataset | None = None,
) -> None:
    """Fit once, and once more after each change, as a plain loop does."""
    dataset = dataset or data()
    model = make()
    reference = copy.deepcopy(model)
    trainer = Trainer(
        model,
        loss=F.cross_entropy,
        optimizer=optimizer,
        plan=plan(name, len(model)),
        minibatch_size=MINIBATCH,
        hang_timeout=30,
    )
    loop = Loop(reference, optimizer, dataset)
    for change in (lambda _: None, *changes):
        change(model), change(reference)
        trainer.fit(dataset, 1, shuffle=False)
        loop.fit()
    state = trainer.full_state_dict()
    trainer.close()
    if state is not None:
        torch.testing.assert_close(state, dict(reference.state_dict()), rtol=0, atol=1e-10)
        print(f"{story}, plan {name}: as one process", flush=True)


def leave_gradients(model: nn.Sequential) -> nn.Sequential:
    model(torch.ones(3, WIDTH)).sum().backward()
    return model


def with_stale_gradients() -> nn.Sequential:
    return leave_gradients(mlp())


def with_frozen_norm() -> nn.Sequential:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4))
    model[1].eval()
    model[2].eval()
    return model


def with_frozen(*layers: int) -> Callable[[], nn.Sequential]:
    def make() -> nn.Sequential:
        model = mlp()
        for i in layers:
            model[i].requires_grad_(False)
        return model

    return make


def trained(layer: int, is_trained: bool) -> Callable[[nn.Sequential], object]:
    return lambda model: model[layer].requires_grad_(is_trained)


def looking_up(sparse: bool) -> Callable[[], nn.Sequential]:
    def make() -> nn.Sequential:
        torch.manual_seed(3)
        return nn.Sequential(nn.Embedding(50, 4, sparse=sparse), nn.Flatten(), nn.Linear(12, 4))

    return make


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, 8, dtype=torch.complex128))

    def forward(self, x):
        return (x.to(torch.complex128) @ self.weight).abs()


def with_complex() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(Complex(), nn.Linear(8, 4))


class Buffers(nn.Module):
    """One that no state_dict has, and one that `expand` made; rank 1 begins with other numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.rand(WIDTH), persistent=False)
        self.register_buffer("shift", torch.rand(1).expand(WIDTH))

    def forward(self, x):
        return x * self.scale + self.shift


def check_buffers() -> None:
    torch.manual_seed(5 + RANK)
    model = nn.Sequential(Buffers(), *mlp())
    optimizer, both = decaying, plan("2", 4)
    trainer = Trainer(model, loss=F.cross_entropy, optimizer=optimizer, plan=both, minibatch_size=MINIBATCH)
    trainer.fit(data(), 1)
    for buffer in model.buffers():
        first, second = MPI.COMM_WORLD.allgather(buffer.tolist())
        assert first == second
    trainer.close()
    if RANK == 0:
        print("buffers that no state_dict has, and expanded ones: rank 0's", flush=True)


def check_metrics() -> None:
    def within(outputs, targets):
        return (outputs.topk(2, dim=1).indices == targets[:, None]).any(1).sum(), len(targets)

    found = []
    for name in ("1-1", "2"):
        trainer = Trainer(
            mlp(),
            loss=F.cross_entropy,
            optimizer=decaying,
            plan=plan(name, 3),
            minibatch_size=MINIBATCH,
            metrics={"top2": within},
        )
        found += MPI.COMM_WORLD.allgather(trainer.evaluate(data()))
        trainer.close()
    inputs, targets = data().tensors
    best = mlp()(inputs).topk(2, dim=1).indices
    assert all(each.keys() == found[0].keys() for each in found)
    for each in found:
        assert abs(each["top2"] - (best == targets[:, None]).any(1).double().mean().item()) < 1e-12
        assert abs(each["accuracy"] - (best[:, 0] == targets).double().mean().item()) < 1e-12
    if RANK == 0:
        print("metrics: over the whole data set, on every rank", flush=True)
    try:
        options = {"loss": F.cross_entropy, "optimizer": decaying, "plan": plan("1-1", 3)}
        Trainer(mlp(), **options, minibatch_size=MINIBATCH, metrics={f"top{RANK + 1}": within})
    except ValueError as error:
        assert str(error).startswith("metrics must be the same on all ranks: rank 0 has"), error
        if RANK == 0:
            print("metrics of another name on another rank: refused", flush=True)


def check_refused(story: str, told: str, work: Callable[[Trainer], object]) -> None:
    trainer = Trainer(
        mlp(), loss=F.cross_entropy, optimizer=decaying, plan=plan("1-1", 3), minibatch_size=MINIBATCH
    )
    try:
        work(trainer)
    except ValueError as error:
        assert told in str(error), error
        everywhere = MPI.COMM_WORLD.allgather(str(error))
        assert len(set(everywhere)) == 1, everywhere
    else:
        raise AssertionError(f"{story}: not refused")
    trainer.close()
    if RANK == 0:
        print(f"{story}: refused", flush=True)


def shard() -> TensorDataset:
    return TensorDataset(*(tensor.roll(RANK, 0) for tensor in data().tensors))


class OwnNoise(torch.utils.data.Dataset):
    """Draws from a generator of its own: the target, too, is another one each time."""

    def __init__(self, of_target: bool) -> None:
        self.generator, self.of_target = torch.Generator().manual_seed(RANK), of_target

    def __len__(self) -> int:
        return 29

    def __getitem__(self, index: int):
        noise = torch.rand(WIDTH, generator=self.generator)
        return noise, int(noise[0] * 4) if self.of_target else index % 4


def main() -> None:
    for name in ("1-1", "2"):
        check("gradients left before", with_stale_gradients, name, leave_gradients)
        check("modules in evaluation mode", with_frozen_norm, name)
        check("frozen, then trained", with_frozen(0), name, trained(0, True), trained(2, False))
        check("all of a stage frozen, then trained", with_frozen(0), name, trained(0, True), optimizer=lively)
        check("sparse gradients", looking_up(True), name, optimizer=plain, dataset=tokens())
        check("complex parameters", with_complex, name)
    check("rows that are not looked up", looking_up(True), "2", optimizer=lazily, dataset=tokens())
    check_buffers()
    check_metrics()
    one_more = data(29 + RANK)
    check_refused("a shard for each rank", "of dataset[", lambda trainer: trainer.fit(shard()))
    check_refused("another number of samples", "len(dataset)", lambda trainer: trainer.fit(one_more))
    check_refused("another validation set", "len(validation)", lambda t: t.fit(data(), validation=one_more))
    check_refused("another order to evaluate", "of dataset[", lambda trainer: trainer.evaluate(shard()))
    check_refused("minibatches of a rank's own", "train_step", lambda t: t.train_step(*shard()[:MINIBATCH]))
    check_refused("other epochs", "epochs", lambda trainer: trainer.fit(data(), 1 + RANK))
    check_refused("a target drawn anew", "changes each time", lambda t: t.fit(OwnNoise(True)))
    trainer = Trainer(
        mlp(), loss=F.cross_entropy, optimizer=decaying, plan=plan("1-1", 3), minibatch_size=MINIBATCH
    )
    trainer.fit(OwnNoise(False))  # noise in the inputs alone is nobody's fault
    trainer.close()


def lively(parameters):
    """Takes what is trained when it is made, as many scripts do; of a frozen stage that is nothing."""
    return torch.optim.Adam([p for p in parameters if p.requires_grad], lr=0.01)


def plain(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def lazily(parameters):
    return torch.optim.Adagrad(parameters, lr=0.1, lr_decay=0.1)


main()
