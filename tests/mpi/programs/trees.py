"""Under mpirun: models and data sets of dicts, and data sets that are iterated.

    trees.py dicts SCHEDULE           a model of dicts and BatchNorm on all ranks, against one process
trees.py iterated FOLDER PLAN     an iterable data set against the same with an index, stopped and resumed
trees.py uneven                   ranks whose data sets end at different samples: refused on each
"""

import copy
import sys
import zlib
from functools import partial

import torch
from torch import nn

from hybridpipe import Checkpointing, Plan, StageSpec, Trainer
from hybridpipe.comm.mpi import MPI
from hybridpipe.model.rng import random_key

RANKS = MPI.COMM_WORLD.size
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


class Texts(nn.Module):
    """Classifies tokens; its forward computes its own loss."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(11, 6), nn.BatchNorm1d(6)
        self.drop, self.head = nn.Dropout(0.3), nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids, labels):
        hidden = self.norm(self.embed(input_ids).transpose(1, 2)).transpose(1, 2)
        logits = self.head(self.drop(hidden))
        return {"loss": nn.functional.cross_entropy(logits.transpose(1, 2), labels), "logits": logits}


def of_dicts(schedule: str) -> None:
    torch.manual_seed(0)
    ids = torch.randint(0, 11, (24, 5))
    data = [{"input_ids": row, "labels": row.flip(0)} for row in ids]
    model = Texts().double()
    expected = copy.deepcopy(model)
    count = 1 if schedule == "pipedream" else 4
    trainer = Trainer(
        model,
        loss=lambda outputs, batch: outputs["loss"],
        optimizer=SGD,
        plan=Plan((StageSpec(0, 4, RANKS),), schedule, num_microbatches=count),
        minibatch_size=8,
    )
    trainer.fit(data, shuffle=False)
    state = trainer.full_state_dict()
    if MPI.COMM_WORLD.rank == 0:
        assert list(state) == list(expected.state_dict())
        if schedule != "pipedream":
            check_against(expected, one_process(expected, ids), state)
    found = trainer.evaluate(data)
    assert MPI.COMM_WORLD.allgather(found) == [found] * RANKS
    trainer.close()


def one_process(expected: Texts, ids: torch.Tensor) -> list[nn.Module]:
    """Train on the microbatches in order; return each replica's norm, which saw its own ones only."""
    update = SGD(expected.parameters())
    norms = [copy.deepcopy(expected.norm) for _ in range(RANKS)]
    for step in range(3):
        update.zero_grad()
        for m in range(4):
            rows = ids[8 * step + 2 * m : 8 * step + 2 * m + 2]
            norms[m % RANKS](expected.embed(rows).detach().transpose(1, 2))
            torch.manual_seed(random_key(0, step, m, zlib.crc32(b"drop 0")))
            (expected(rows, rows.flip(1))["loss"] / 4).backward()
        update.step()
    return norms


def check_against(expected: Texts, norms: list[nn.Module], state: dict[str, torch.Tensor]) -> None:
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(state[name], parameter.detach(), rtol=0, atol=1e-10)
    for name in ("running_mean", "running_var"):
        mean = torch.stack([getattr(norm, name) for norm in norms]).mean(0)
        torch.testing.assert_close(state[f"norm.{name}"], mean, rtol=0, atol=1e-10)


class Numbers(torch.utils.data.IterableDataset):
    """Noisy samples, and where it stands among them."""

    def __init__(self, count: int) -> None:
        self.count, self.at, self.read = count, 0, 0

    def __iter__(self):
        generator = torch.Generator().manual_seed(2)
        inputs = torch.randn(self.count, 4, generator=generator).double()
        while self.at < self.count:
            self.at, self.read = self.at + 1, self.read + 1
            yield inputs[self.at - 1] + 0.1 * torch.randn(4), (self.at - 1) % 3
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def trainer_of(plan: Plan) -> Trainer:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    cross_entropy = nn.functional.cross_entropy
    return Trainer(model, loss=cross_entropy, optimizer=SGD, plan=plan, minibatch_size=8)


def of_iterated(folder: str, spec: str) -> None:
    replicas = [int(each) for each in spec.split("-")]
    edges = [0, *range(1, len(replicas)), 3]
    stages = [StageSpec(edges[s], edges[s + 1], replicas[s]) for s in range(len(replicas))]
    plan = Plan(tuple(stages), "1f1b", num_microbatches=4)
    whole, data = trainer_of(plan), Numbers(29)
    expected = whole.fit(data, 2, validation=Numbers(10))
    ends = {rank for stage in (plan.stages[0], plan.stages[-1]) for rank in stage.ranks}
    assert (data.read >= 58) == (MPI.COMM_WORLD.rank in {0, *ends}), data.read
    first = trainer_of(plan)
    first.stop_from(2)
    first.fit(Numbers(29), 2, checkpoint=Checkpointing(folder, every=1))
    second, rest = trainer_of(plan), Numbers(29)
    second.resume(folder)
    second.fit(rest, 2, validation=Numbers(10))
    assert rest.read <= 29 + 29 - 16 + 2 * 6 + 8, "what was trained on is not read again"
    assert [each["loss"] for each in second.history] == [each["loss"] for each in expected]
    assert [each["validation"] for each in second.history] == [each["validation"] for each in expected]
    both = whole.full_state_dict(), second.full_state_dict()
    if MPI.COMM_WORLD.rank == 0:
        assert all(torch.equal(tensor, both[1][key]) for key, tensor in both[0].items())
    for trainer in (whole, first, second):
        trainer.close()


def uneven() -> None:
    trainer = trainer_of(Plan((StageSpec(0, 3, RANKS),), "1f1b", num_microbatches=4))
    try:
        trainer.fit(Numbers(24 + MPI.COMM_WORLD.rank))
    except ValueError as error:
        told = MPI.COMM_WORLD.allgather(str(error))
        assert told == [told[0]] * RANKS and "have read different numbers of samples" in told[0], told
        assert trainer.step == 2, trainer.step
    else:
        raise AssertionError("it was not noticed")


{"dicts": of_dicts, "iterated": of_iterated, "uneven": uneven}[sys.argv[1]](*sys.argv[2:])
if MPI.COMM_WORLD.rank == 0:
    print("all as it should be")
