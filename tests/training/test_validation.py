"""The first words of a newcomer, and models that cannot be trained as they are: one line each."""

import threading
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from hybridpipe import Checkpointing, Plan, StageSpec
from hybridpipe.callbacks import EarlyStopping
from hybridpipe.errors import UserError

cross_entropy = nn.functional.cross_entropy
sgd = partial(torch.optim.SGD, lr=0.1)

pytestmark = pytest.mark.usefixtures("quick")


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def data(num_samples: int = 16) -> TensorDataset:
    return TensorDataset(torch.randn(num_samples, 4), torch.randint(0, 3, (num_samples,)))


@pytest.fixture
def make(make_trainer):
    def trainer(model=None, **options):
        model = mlp() if model is None else model
        given = {"loss": cross_entropy, "optimizer": sgd, "plan": "dp", "minibatch_size": 8}
        return make_trainer(model, **(given | options))

    return trainer


class Centres(nn.Module):
    """A loss with parameters of its own."""

    def __init__(self):
        super().__init__()
        self.centres = nn.Parameter(torch.zeros(3, 3))

    def forward(self, outputs, targets):
        return (outputs - self.centres[targets]).square().mean()


CENTRES = Centres()


@pytest.mark.parametrize(
    "options, error, told",
    [
        (
            {"optimizer": sgd([torch.zeros(1)])},
            TypeError,
            "optimizer must be a callable .* got the SGD object",
        ),
        ({"optimizer": "sgd"}, TypeError, "optimizer must be a callable .* got 'sgd'"),
        (
            {"lr_scheduler": torch.optim.lr_scheduler.StepLR(sgd([torch.zeros(1)]), 1)},
            TypeError,
            "lr_scheduler must be a callable .* got the StepLR object",
        ),
        (
            {"loss": nn.CrossEntropyLoss},
            TypeError,
            r"got the class CrossEntropyLoss: .* CrossEntropyLoss\(\)",
        ),
        ({"loss": "mse"}, TypeError, "loss must be a function .* got 'mse'"),
        ({"loss": CENTRES}, ValueError, "no parameters of its own, .* got Centres with centres"),
        ({"loss": CENTRES.forward}, ValueError, "got Centres with centres"),
        ({"loss": partial(CENTRES)}, ValueError, "got Centres with centres"),
        ({"plan": "ddp"}, UserError, r"got 'ddp' \(did you mean 'dp'\? allowed: auto, dp, straight\)"),
        ({"plan": None}, TypeError, "plan must be a Plan, a path or one of auto, dp, straight, got None"),
        ({"device": "tpu"}, ValueError, "device must be 'cpu', 'cuda' or 'cuda:N', got 'tpu'"),
        ({"device": "cuda:99"}, ValueError, "got 'cuda:99': "),
        ({"batch_size": 8}, TypeError, r"got .* 'batch_size' \(did you mean 'minibatch_size' or 'micro"),
        ({"scheduler": None}, TypeError, "did you mean 'schedule' or 'lr_scheduler'"),
        ({"minibatch_size": 8.0}, ValueError, "minibatch_size must be an integer >= 1, got 8.0"),
        ({"microbatch_size": 16}, ValueError, "microbatch_size must be <= minibatch_size = 8, got 16"),
        ({"seed": 1.5}, ValueError, "seed must be a 64-bit integer, got 1.5"),
        ({"num_workers": -1}, ValueError, "num_workers must be an integer >= 0, got -1"),
    ],
)
def test_a_mistake_in_an_argument_is_told(make, options, error, told):
    with pytest.raises(error, match=told) as caught:
        make(**options)
    assert "\n" not in str(caught.value)


def test_of_an_unknown_argument_is_told_what_was_meant(make):
    told = r"^Trainer.fit\(\) got an unexpected keyword argument 'epoch' \(did you mean 'epochs'\?.*\)$"
    with pytest.raises(TypeError, match=told):
        make().fit(data(), epoch=3)
    with pytest.raises(TypeError, match=r"^StageSpec\(\) got .* \(did you mean 'replicas'"):
        StageSpec(0, 3, replica=2)
    with pytest.raises(TypeError, match=r"^Checkpointing\(\) got .* \(did you mean 'folder'"):
        Checkpointing(folders="here")
    with pytest.raises(TypeError, match=r"^EarlyStopping\(\) got .* \(did you mean 'patience'"):
        EarlyStopping(patients=3)


def test_a_loss_that_closes_over_parameters_is_refused(make):
    centres = Centres()
    with pytest.raises(ValueError, match="got Centres with centres"):
        make(loss=lambda outputs, targets: centres(outputs, targets))
    centres.requires_grad_(False)
    make(loss=lambda outputs, targets: centres(outputs, targets)).fit(data())


def test_a_loss_that_uses_parameters_from_anywhere_is_refused(make):
    """No one looks into globals beforehand; the graph tells."""
    with pytest.raises(ValueError, match=r"the loss uses a parameter of shape \(3, 3\)"):
        make(loss=lambda outputs, targets: CENTRES(outputs, targets), plan=Plan((StageSpec(0, 3),))).fit(
            data()
        )


def test_a_loss_may_use_the_weights_of_its_stage(make):
    model = mlp()
    make(model, loss=lambda o, t: cross_entropy(o, t) + 0.01 * model[0].weight.square().sum()).fit(data())


def test_integers_of_numpy_are_integers(make):
    eight, one = np.int64(8), np.int32(1)
    plan = Plan((StageSpec(np.int64(0), np.int64(3), replicas=one),), num_microbatches=np.int16(4))
    assert repr(plan) == repr(Plan((StageSpec(0, 3),), num_microbatches=4))
    trainer = make(plan=plan, minibatch_size=eight, seed=np.uint8(3), num_workers=np.int64(0))
    assert type(trainer.minibatch_size) is int
    trainer.fit(data(), epochs=np.int64(1))
    assert trainer.epoch == 1


class ExtraState(nn.Linear):
    def get_extra_state(self):
        return {"calls": 3}

    def set_extra_state(self, state):
        assert state == {"calls": 3}


def buffered(buffer: torch.Tensor) -> nn.Sequential:
    model = mlp()
    model[1].register_buffer("adjacency", buffer)
    return model


def renaming() -> nn.Sequential:
    model = mlp()
    model[0].register_state_dict_post_hook(
        lambda module, state, prefix, _: state.update({f"{prefix}copy": state[f"{prefix}weight"].clone()})
    )
    return model


def unset() -> nn.Module:
    """Return a model on the meta device whose second module does not set its parameters."""
    last = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))
    return nn.Sequential(nn.Linear(4, 3), last).to("meta")


@pytest.mark.parametrize(
    "model, told",
    [
        (
            lambda: nn.Sequential(nn.LazyLinear(3)),
            r"0.weight of the model has no shape yet, as in LazyLinear",
        ),
        (
            lambda: nn.Sequential(ExtraState(4, 3)),
            r"0._extra_state in model.state_dict\(\) must be a parameter",
        ),
        (renaming, r"0.copy in model.state_dict\(\) must be a parameter or a buffer"),
        (
            lambda: buffered(torch.eye(4).to_sparse()),
            "1.adjacency of the model must be a dense tensor, got spar",
        ),
        (
            lambda: buffered(torch.ones(4).as_strided((3, 2), (1, 1))),
            "1.adjacency .* must not overlap itself",
        ),
        (unset, "1.parametrizations.weight.original0 of a ParametrizationList is on the meta device"),
    ],
    ids=["lazy", "extra state", "state_dict hook", "sparse", "overlapping", "meta"],
)
def test_state_that_cannot_be_carried_is_refused_at_the_start(make, model, told):
    with pytest.raises(ValueError, match=told):
        make(model()).prepare(data())


def test_an_expanded_buffer_is_trained_with(make):
    model = buffered(torch.ones(1, 1).expand(3, 4))
    make(model).fit(data())
    assert model[1].adjacency.shape == (3, 4) and model[1].adjacency.stride() == (0, 0)


class Locked(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.lock = threading.Lock()


def hooked_norm() -> nn.Module:
    with pytest.warns(FutureWarning):
        layer = nn.utils.weight_norm(nn.Linear(6, 3))
    layer(torch.ones(1, 6))
    return layer


@pytest.mark.parametrize("layer", [lambda: Locked(6, 3), hooked_norm], ids=["lock", "hook-style weight_norm"])
def test_a_layer_that_cannot_be_copied_needs_a_plan(make, layer):
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), layer())
    with pytest.raises(UserError, match=r"layer 2 \(\w+\) cannot be copied: .*; give a plan"):
        make(model, plan="auto").fit(data())
    make(model, plan=Plan((StageSpec(0, 3),))).fit(data())


@pytest.mark.parametrize(
    "norm, options",
    [(nn.SyncBatchNorm, {}), (nn.BatchNorm1d, {"sync_batchnorm": 2})],
)
def test_norms_of_several_replicas_are_refused_where_they_cannot_run_together(make, norm, options):
    """A SyncBatchNorm once trained as a BatchNorm without a word."""
    model = nn.Sequential(nn.Linear(4, 6), norm(6), nn.Linear(6, 3))
    plan = Plan((StageSpec(0, 3, 2),), "pipedream")
    with pytest.raises(ValueError, match=r"^stages\[0\].sync_batchnorm must be 1 under pipedream, got 2: "):
        make(model, plan=plan, **options)


def test_a_script_that_srun_starts_without_pmix_says_that_each_rank_trains_alone(make, monkeypatch, capsys):
    monkeypatch.delenv("OMPI_COMM_WORLD_SIZE", raising=False)
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    for started, lines in (("1", 0), ("2", 1)):
        monkeypatch.setenv("SLURM_STEP_NUM_TASKS", started)
        make(mlp(), verbose=False).close()
        told = capsys.readouterr().err
        assert told.count("\n") == lines, told
    assert "the launcher started 2 ranks, and this one sees a world of 1: each trains alone" in told
