"""Under mpirun: replicas that shard the update train what each of them would train alone.

With two replicas, whose sums have one order, that is so to the bit. The stage trains with some of torch's
elementwise optimizers, in two groups of options, a model of uneven sizes: with sparse gradients, complex
numbers, a parameter that few microbatches use and some that are frozen for a while.
Usage: sharded.py CASE...
"""

import sys
import tempfile
from functools import partial

import torch
from mpi4py import MPI
from torch import nn

from hybridpipe import Plan, StageSpec, Trainer
from hybridpipe.engine.traffic import traffic
from hybridpipe.errors import UserError
from hybridpipe.optim import gradient_sync

gradient_sync.BUCKET_BYTES = 2**13  # several buckets
MINIBATCH, COUNT, TOKENS, WIDTH = 12, 6, 50, 37
REPLICAS = MPI.COMM_WORLD.size
CUT = StageSpec(0, 2), StageSpec(2, 4)
WAYS = [(1, False), (2, True), (1, True), (2, False)]  # zero, scatter


class Uneven(nn.Module):
    """A layer of odd sizes: a part of it is complex, and a part is passed by at times."""

    def __init__(self, real: bool) -> None:
        super().__init__()
        self.wide = nn.Linear(WIDTH, 113)
        self.back = nn.Linear(113, WIDTH)
        self.turn = nn.Parameter(torch.randn(WIDTH, dtype=torch.float32 if real else torch.complex64))
        self.rare = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.back(torch.tanh(self.wide(x)))
        x = x + torch.real(x * self.turn)
        return x + self.rare(x) if x.sum() > 0 else x


class Tokens(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH, sparse=sparse)

    def forward(self, tokens):
        return self.embedding(tokens).mean(1)


def make_model(dtype: torch.dtype, sparse: bool, real: bool) -> nn.Sequential:
    torch.manual_seed(1)
    model = nn.Sequential(Tokens(sparse), Uneven(real), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 5))
    for p in model.parameters() if dtype == torch.float64 else ():
        p.data = p.data.to(torch.complex128 if p.is_complex() else dtype)
    return model


def groups(kind: type, parameters):
    """Two groups by the number of dimensions, which parts of parameters no longer have."""
    parameters = list(parameters)
    matrices = [p for p in parameters if p.ndim > 1]
    others = [p for p in parameters if p.ndim < 2]
    return kind([{"params": matrices, "lr": 0.02}, {"params": others, "lr": 0.003}], lr=0.01)


def minibatches():
    generator = torch.Generator().manual_seed(2)
    for size in [MINIBATCH, MINIBATCH, 7, MINIBATCH, 3, MINIBATCH]:
        tokens = torch.randint(0, TOKENS, (size, 4), generator=generator)
        yield tokens, torch.randint(0, 5, (size,), generator=generator)


def train(optimizer, zero: int, scatter: bool, dtype=torch.float64, sparse=False, cut=(), **options):
    """Return the trained state (on rank 0), and the bytes of this rank's optimizer."""
    stages = cut or (StageSpec(0, 4, REPLICAS, zero=zero, scatter=scatter),)
    trainer = Trainer(
        make_model(dtype, sparse, real="precision" in options),
        loss=nn.functional.cross_entropy,
        optimizer=optimizer,
        plan=Plan(stages, num_microbatches=COUNT),
        minibatch_size=MINIBATCH,
        **options,
    )
    for i, minibatch in enumerate(minibatches()):
        for parameter in trainer.model[2].parameters():
            parameter.requires_grad = i not in (1, 2)
        trainer.train_step(*minibatch)
    executor = trainer.worker.executor
    kept = executor.update.optimizer.state.values() if executor.update.optimizer else ()
    tensors = [value for state in kept for value in state.values() if torch.is_tensor(value) and value.ndim]
    state, num_bytes = trainer.full_state_dict(), sum(tensor.nbytes for tensor in tensors)
    moved = traffic(executor)
    assert (moved.gathered > 0) == (zero > 0)
    trainer.close()
    return state, num_bytes, moved.reduced


def compare(state, expected, within: float | None) -> None:
    for key, value in (state or {}).items():
        worst = (value - expected[key]).abs().max().item()
        assert worst == 0 if within is None else worst < within, (key, worst)


def optimizers() -> None:
    """Some with state from the start or before the first step, in types with fused kernels and without."""
    kinds = [torch.optim.Adam, torch.optim.Adagrad, torch.optim.ASGD, partial(torch.optim.SGD, momentum=0.9)]
    for kind, (zero, scatter), dtype in zip(kinds, WAYS, [torch.float32, torch.float64] * 2, strict=True):
        factory = partial(groups, kind)
        expected, whole, reduced = train(factory, 0, False, dtype)
        state, part, moved = train(factory, zero, scatter, dtype)
        close = 1e-10 if dtype == torch.float64 else 1e-4
        compare(state, expected, None if (zero, REPLICAS) == (1, 2) else close)
        assert abs(part - whole / REPLICAS) <= 0.02 * whole / REPLICAS, (kind, part, whole)
        assert moved == reduced if (zero, scatter) == (1, False) else moved > 0.9 * reduced, moved
        tell(f"{kind}: as each replica alone, with its share of the state")


def sparse() -> None:
    """Sparse gradients are updated whole, by each replica."""
    factory = partial(torch.optim.SGD, lr=0.05)
    expected, *_ = train(factory, 0, False, sparse=True)
    for zero, scatter in WAYS[:2]:
        state, *_ = train(factory, zero, scatter, sparse=True)
        compare(state, expected, 1e-10)
    tell("sparse gradients: as each replica alone")


def options() -> None:
    """Clipping, gradients in 16 bits, bf16 copies of weights, and a schedule of learning rates."""
    factory = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
    schedule = partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=20)
    for given, dtype, within in [
        ({"clip_grad_norm": 0.3, "lr_scheduler": schedule}, torch.float64, 1e-10),
        ({"compression": "fp16"}, torch.float32, 1e-3),
        ({"precision": "bf16-params"}, torch.float32, 1e-5),
    ]:
        expected, *_ = train(factory, 0, False, dtype, **given)
        for zero, scatter in WAYS[:2]:
            state, *_ = train(factory, zero, scatter, dtype, **given)
            exact = (zero, REPLICAS) == (1, 2) and "clip_grad_norm" not in given
            compare(state, expected, None if exact else within)
        tell(f"{', '.join(given)}: as each replica alone")


class Lamb(torch.optim.Optimizer):
    """Scales updates by a norm of the whole parameter."""

    def __init__(self, params) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad * (group["lr"] * p.norm() / p.grad.norm()))


class Clipped(torch.optim.SGD):
    """Clips by the norm of all that it updates."""

    def step(self):
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.3)
        super().step()


def hooked(parameters) -> torch.optim.Optimizer:
    """Clips in a hook, by the list that it was given."""
    given = list(parameters)
    optimizer = torch.optim.SGD(given, lr=0.05)
    optimizer.register_step_pre_hook(lambda *_: (nn.utils.clip_grad_norm_(given, 0.3), None)[1])
    return optimizer


def trained_only(parameters) -> torch.optim.Optimizer:
    return torch.optim.Adam([p for p in parameters if p.requires_grad], lr=0.01)


def frozen() -> None:
    """What a stage without an update has saved goes on in one that has one, and the other way round."""
    plans = [
        Plan((StageSpec(0, 2), StageSpec(2, 4)), num_microbatches=COUNT),
        Plan((StageSpec(0, 4, 2, zero=1, scatter=True),), num_microbatches=COUNT),
        Plan((StageSpec(0, 4, 2, zero=1),), num_microbatches=COUNT),
    ]
    states, folder = [], MPI.COMM_WORLD.bcast(tempfile.mkdtemp())
    for before, plan in zip([None, *plans], plans, strict=False):
        model = make_model(torch.float64, sparse=False, real=True)
        model[:2].requires_grad_(False)
        trainer = Trainer(
            model,
            loss=nn.functional.cross_entropy,
            optimizer=trained_only,
            plan=plan,
            minibatch_size=MINIBATCH,
        )
        if before is not None:
            told = trainer.resume(folder)
            assert trainer.step == len(states) and told, told
        for minibatch in list(minibatches())[len(states) : len(states) + 1]:
            trainer.train_step(*minibatch)
        trainer.save(folder)
        states.append(trainer.full_state_dict())
        trainer.close()
    tell("a frozen stage: resumed under each plan")


def refused() -> None:
    """What looks beyond an element under `zero`, and beyond a parameter under several stages."""
    for optimizer, zero, cut in [(Lamb, 1, ()), (Clipped, 0, CUT), (hooked, 0, CUT)]:
        try:
            train(optimizer, zero, False, cut=cut)
        except UserError as error:
            tell(f"refused: {error}")
        else:
            raise AssertionError("not refused")
        train(optimizer, zero, False, cut=cut, optimizer_per_stage=True)
    expected, *_ = train(Lamb, 0, False)
    state, *_ = train(Lamb, 0, False, cut=CUT)
    compare(state, expected, 1e-10)
    tell("an optimizer that looks at a parameter, in two stages: as each replica alone")


def tell(line: str) -> None:
    if MPI.COMM_WORLD.rank == 0:
        print(line, flush=True)


for case in sys.argv[1:]:
    globals()[case]()
