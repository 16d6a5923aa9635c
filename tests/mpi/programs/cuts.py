"""What crosses a cut: skip connections, integers, tensors without gradient; in place, frozen, bf16."""

import copy
from functools import partial

import torch
from torch import Tensor, nn

from hybridpipe import Plan, StageSpec, Trainer
from hybridpipe.comm.mpi import MPI


class Fork(nn.Module):
    """(x) -> (h, x, index, mask): h needs a gradient, the rest does not."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.linear(x), x, x.argmax(-1), x > 0


class Mix(nn.Module):
    """Uses some, passes all on; transposes, so that a tensor crosses that is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.frozen = nn.Embedding(4, 4), nn.Linear(4, 4).requires_grad_(False)

    def forward(self, value: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        h, x, index, mask = value
        return (self.frozen(h) + self.table(index)).t(), x, mask


class Join(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out, self.never_used = nn.Linear(4, 2), nn.Linear(2, 2)

    def forward(self, value: tuple[Tensor, ...]) -> Tensor:
        h, x, mask = value
        return self.out(h.t().relu() * mask + x)


def check(dtype: torch.dtype, tolerance: float, replicas: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Fork(), Mix(), Join(), nn.ReLU(inplace=True), nn.Linear(2, 2)).to(dtype)
    expected = copy.deepcopy(model)
    inputs, targets = torch.randn(12, 4).to(dtype), torch.randn(12, 2).to(dtype)
    edges = [0, 1, 3, 5]  # the last stage begins with an in-place ReLU
    stages = tuple(StageSpec(a, b, m) for a, b, m in zip(edges, edges[1:], replicas, strict=False))
    make = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1)
    trainer = Trainer(
        model,
        loss=nn.functional.mse_loss,
        optimizer=make,
        plan=Plan(stages, num_microbatches=6),
        minibatch_size=12,
    )
    optimizer = make([p for p in expected.parameters() if p.requires_grad])
    for _ in range(5):
        trainer.train_step(inputs, targets)
        nn.functional.mse_loss(expected(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    state = trainer.full_state_dict()
    if state is not None:
        for name, value in expected.state_dict().items():
            torch.testing.assert_close(
                state[name], value, rtol=0, atol=tolerance, msg=lambda text, n=name: f"{n}: {text}"
            )
    trainer.close()


for replicas in ((1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2)):
    check(torch.float64, 1e-12, replicas)
check(torch.bfloat16, 0.05, (2, 1, 1))  # Horovod takes no bf16
if MPI.COMM_WORLD.rank == 0:
    print("all cuts crossed")
