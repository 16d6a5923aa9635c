"""BatchNorm under 2-1: statistics are a microbatch's; running statistics, when used, the replicas' mean.

By the samples that each has seen: of three microbatches, the last one short, one replica has two.
"""

import copy
from functools import partial

import torch
from torch import nn

from hybridpipe import Plan, StageSpec, Trainer
from hybridpipe.comm.mpi import MPI

torch.manual_seed(0)
model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
inputs, targets = torch.randn(8, 3, dtype=torch.float64), torch.randn(8, 2, dtype=torch.float64)
expected = copy.deepcopy(model).train()
plan = Plan((StageSpec(0, 2, 2), StageSpec(2, 4, 1)), num_microbatches=3)
trainer = Trainer(
    model,
    loss=nn.functional.mse_loss,
    optimizer=partial(torch.optim.SGD, lr=0.1),
    plan=plan,
    minibatch_size=9,
)
trainer.train_step(inputs, targets)
state = trainer.full_state_dict()

# One process: replica r of the first stage sees the microbatches r, r + 2; the second stage sees all three.
optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
first_stages = [copy.deepcopy(expected[:2]) for _ in range(2)]
seen = [3 + 2, 3]  # samples
for m in range(3):
    x, y = inputs[3 * m : 3 * m + 3], targets[3 * m : 3 * m + 3]
    first_stages[m % 2](x)  # for its running statistics
    nn.functional.mse_loss(expected(x), y).mul(len(y) / 8).backward()
optimizer.step()
if MPI.COMM_WORLD.rank == 0:
    for name in ("running_mean", "running_var"):
        each = [getattr(stage[0], name) for stage in first_stages]
        mean = (each[0] * seen[0] + each[1] * seen[1]) / 8
        torch.testing.assert_close(state[f"0.{name}"], mean, rtol=0, atol=1e-12)
        assert not torch.allclose(getattr(first_stages[0][0], name), mean), "the replicas differed"
        torch.testing.assert_close(state[f"2.{name}"], getattr(expected[2], name), rtol=0, atol=1e-12)
    assert state["0.num_batches_tracked"] == state["2.num_batches_tracked"] == 3
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(state[name], parameter.detach(), rtol=0, atol=1e-12)
first = trainer.evaluate(torch.utils.data.TensorDataset(inputs, targets))
assert MPI.COMM_WORLD.allgather(first) == [first] * 3, "every rank reports the same"
reloaded = copy.deepcopy(model).eval()
if MPI.COMM_WORLD.rank == 0:
    reloaded.load_state_dict(state)
    assert abs(nn.functional.mse_loss(reloaded(inputs), targets).item() - first["loss"]) < 1e-12
trainer.close()
