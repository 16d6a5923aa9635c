"""Under mpirun: the state of a recorded model, from plan to plan, and ranks that disagree about its forward.

any_model_state.py moved FOLDER       saved and resumed under plans of other stages, and from plain files
any_model_state.py layered FOLDER     saved as one layer, resumed as many
any_model_state.py differing          a forward that branches on its rank: told on every rank
"""

import sys
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parents[3]))
from hybridpipe import Plan, StageSpec, Trainer
from hybridpipe.comm.mpi import MPI
from hybridpipe.model.layers import layers_of
from tests.model import everything

WORLD = MPI.COMM_WORLD
BATCHES = [everything.batch(8, 6, seed) for seed in range(4)]


class BranchesOnRank(everything.Everything):
    """A mistake that a user may make."""

    def forward(self, input_ids, attention_mask=None):
        out = super().forward(input_ids, attention_mask)
        return {**out, "logits": out["logits"] * 2} if WORLD.rank == 1 else out


class Whole(everything.Everything):
    """A forward that cannot be cut: its way follows from activations."""

    def forward(self, input_ids, attention_mask=None):
        out = super().forward(input_ids, attention_mask)
        return {**out, "penalty": out["penalty"] * 2} if out["logits"].sum() > 1e9 else out


def model_of(kind=everything.Everything, seed: int = 0):
    torch.manual_seed(seed)
    return kind().double()


def trainer_of(name: str, model) -> Trainer:
    num_layers = layers_of(model, {key: each[:2] for key, each in BATCHES[0][0].items()}).num_layers
    replicas = [int(each) for each in name.split("-")]
    edges = [round(i * num_layers / len(replicas)) for i in range(len(replicas) + 1)]
    stages = tuple(StageSpec(a, b, m) for a, b, m in zip(edges, edges[1:], replicas, strict=False))
    optimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    return Trainer(
        model,
        loss=everything.loss,
        optimizer=optimizer,
        plan=Plan(stages, num_microbatches=4),
        minibatch_size=8,
    )


def same(state, expected, what: str) -> None:
    if state is None:
        return
    assert list(state) == list(model_of().state_dict()), what
    for key, tensor in expected.items():
        assert torch.equal(state[key], tensor), (what, key)
    print(f"{what}: the same", flush=True)


def moved(folder: str) -> None:
    """Train two minibatches under 1-1; resume under other plans, without and with a first minibatch."""
    root, without_end = Path(folder), trainer_of("1-1", model_of())
    for batch in BATCHES[:2]:
        without_end.train_step(*batch)
    state = without_end.full_state_dict()
    without_end.save(root / "0")
    losses = [without_end.train_step(*batch) for batch in BATCHES[2:]]
    for number, name in enumerate(["2", "1-1-1", "1-1"]):
        trainer = trainer_of(name, model_of(seed=number + 5))
        if name == "1-1-1":
            trainer.train_step(*BATCHES[3])  # the layers are known, and the state is another one
        trainer.resume(root / str(number))
        trainer.prepare([({key: each[0] for key, each in BATCHES[0][0].items()}, BATCHES[0][1][0])] * 8)
        same(trainer.full_state_dict(), state, f"{name} from {number}")
        trainer.save(root / str(number + 1))
        if name != "2":  # whose replicas have a buffer of their own
            found = [trainer.train_step(*batch) for batch in BATCHES[2:]]
            assert all(abs(a - b) <= 1e-10 for a, b in zip(found, losses, strict=True)), (name, found, losses)
        trainer.close()
    if WORLD.rank == 0:
        own = {
            key: tensor for key, tensor in state.items() if key != "head.weight"
        }  # as from_pretrained has it
        save_file(own | {"head.weight": state["head.weight"].clone()}, root / "weights.safetensors")
    WORLD.barrier()
    trainer = trainer_of("1-1-1", model_of(seed=9))
    trainer.resume(root / "weights.safetensors")
    trainer.prepare([({key: each[0] for key, each in BATCHES[0][0].items()}, BATCHES[0][1][0])] * 8)
    same(trainer.full_state_dict(), state, "weights.safetensors")
    trainer.close()
    without_end.close()


def layered(folder: str) -> None:
    first = trainer_of("2", model_of(Whole))
    assert first.train_step(*BATCHES[0]) and first.plan.num_layers == 1
    first.train_step(*BATCHES[1])
    state, momenta = (
        first.full_state_dict(),
        len(first.worker.executor.update.optimizer.state) if WORLD.rank == 0 else 0,
    )
    first.save(folder)
    second = trainer_of("1-1-1", model_of(seed=3))
    second.resume(folder)
    second.prepare([({key: each[0] for key, each in BATCHES[0][0].items()}, BATCHES[0][1][0])] * 8)
    same(second.full_state_dict(), state, "one layer as many")
    optimizer = second.worker.executor.update.optimizer
    held = 0 if optimizer is None else len(optimizer.state)
    assert WORLD.allreduce(held) >= WORLD.bcast(momenta), "the optimizer's state comes, too"
    for trainer in (first, second):
        trainer.close()


def differing() -> None:
    torch.manual_seed(0)
    trainer = Trainer(
        BranchesOnRank().double(),
        loss=everything.loss,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        plan="straight",
        minibatch_size=8,
    )
    try:
        trainer.train_step(*BATCHES[0])
    except ValueError as error:
        told = WORLD.allgather(str(error))
        assert told == [told[0]] * WORLD.size and "the forward of the model" in told[0], told
        assert "\n" not in told[0] and trainer.step == 0
        if WORLD.rank == 0:
            print(f"told: {error}", flush=True)
    else:
        raise AssertionError("it was not noticed")
    trainer.close()


torch.set_num_threads(1)
{"moved": moved, "layered": layered, "differing": differing}[sys.argv[1]](*sys.argv[2:])
