"""BatchNorm under 2-1: statistics are a microbatch's; running statistics, when used, the replicas' mean."""

import copy
from functools import partial

import torch
from torch import nn

from hybridpipe import Plan, StageSpec, Trainer
from hybridpipe.runtime.mpi import MPI

torch.manual_seed(0)
model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
inputs, targets = torch.randn(8, 3, dtype=torch.float64), torch.randn(8, 2, dtype=torch.float64)
expected = copy.deepcopy(model).train()
plan = Plan((StageSpec(0, 2, 2), StageSpec(2, 4, 1)), num_microbatches=4)
trainer = Trainer(
    model,
    loss=nn.functional.mse_loss,
    optimizer=partial(torch.optim.SGD, lr=0.1),
    plan=plan,
    minibatch_size=8,
)
trainer.train_step(inputs, targets)
state = trainer.full_state_dict()

# One process: replica r of the first stage sees the microbatches r, r + 2; the second stage sees all four.
optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
first_stages = [copy.deepcopy(expected[:2]) for _ in range(2)]
for m in range(4):
    part = slice(2 * m, 2 * m + 2)
    first_stages[m % 2](inputs[part])  # for its running statistics
    nn.functional.mse_loss(expected(inputs[part]), targets[part]).mul(2 / 8).backward()
optimizer.step()
if MPI.COMM_WORLD.rank == 0:
    for name in ("running_mean", "running_var"):
        mean = (getattr(first_stages[0][0], name) + getattr(first_stages[1][0], name)) / 2
        torch.testing.assert_close(state[f"0.{name}"], mean, rtol=0, atol=1e-12)
        assert not torch.allclose(getattr(first_stages[0][0], name), mean), "the replicas differed"
        torch.testing.assert_close(state[f"2.{name}"], getattr(expected[2], name), rtol=0, atol=1e-12)
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(state[name], parameter.detach(), rtol=0, atol=1e-12)
first = trainer.evaluate(torch.utils.data.TensorDataset(inputs, targets))
assert MPI.COMM_WORLD.allgather(first) == [first] * 3, "every rank reports the same"
reloaded = copy.deepcopy(model).eval()
if MPI.COMM_WORLD.rank == 0:
    reloaded.load_state_dict(state)
    assert abs(nn.functional.mse_loss(reloaded(inputs), targets).item() - first["loss"]) < 1e-12
trainer.close()
