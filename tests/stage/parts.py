"""Layers of every kind with inputs that fit, in float64, for tests of a stage's backward.

`CASES` maps a name to a function that makes (layers, inputs).
"""

import torch
from torch import nn

from hybridpipe.model.stage_module import StageModule
from hybridpipe.model.tensors import tensors_of
from hybridpipe.stage.stage import Stage
from tests.stage.helpers import (
    Call,
    Checkpointed,
    Implicit,
    OnFirst,
    Penalised,
    Shared,
    Stateful,
    Tied,
    fork,
    join,
)


def tensor(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def indices(*shape: int) -> torch.Tensor:
    return torch.randint(5, shape)


def frozen(module: nn.Module, *names: str) -> nn.Module:
    for name in names or [name for name, _ in module.named_parameters()]:
        module.get_parameter(name).requires_grad_(False)
    return module


def noisy() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 3))


def first(module: nn.Module) -> Call:
    """Returns only the first output of a module, such as an LSTM."""
    call = Call(lambda x: module(x)[0])
    call.module = module
    return call


CASES = {
    "linear": lambda: ([nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)], tensor(5, 3)),
    "no bias": lambda: ([nn.Linear(3, 4, bias=False), nn.Linear(4, 2, bias=False)], tensor(5, 3)),
    "one dimension": lambda: ([nn.Linear(3, 4)], tensor(3)),
    "four dimensions": lambda: (
        [nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2)],
        tensor(2, 5, 2, 3),
    ),
    "not contiguous": lambda: (
        [
            Call(lambda x: x.transpose(0, 2)),
            nn.Linear(3, 4),
            Call(lambda x: x.permute(2, 0, 1)[..., ::2]),
            nn.Linear(2, 2, bias=False),
        ],
        tensor(3, 4, 2),
    ),
    "no samples": lambda: ([nn.Linear(3, 4), nn.Linear(4, 2)], tensor(0, 3)),
    "work in place": lambda: (
        [nn.ReLU(inplace=True), nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2)],
        tensor(5, 3),
    ),
    "tuple": lambda: (
        [fork(), OnFirst(nn.Linear(3, 3)), OnFirst(nn.Dropout(0.5)), join(), nn.Linear(3, 2)],
        tensor(5, 3),
    ),
    "convolutions": lambda: (
        [
            nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2),
            nn.ReLU(inplace=True),
            nn.Conv2d(6, 2, (3, 1), dilation=(2, 1), padding="same", bias=False),
            nn.Conv2d(2, 2, 2, padding="valid"),
            nn.Flatten(2),
            nn.Conv1d(2, 3, 3, padding=(1,), padding_mode="circular"),
        ],
        tensor(2, 4, 8, 6),
    ),
    "three dimensions": lambda: ([nn.Conv3d(2, 3, (1, 2, 3), padding=(0, 1, 2))], tensor(2, 2, 3, 4, 5)),
    "convolution of one sample": lambda: ([nn.Conv2d(2, 3, 3)], tensor(2, 5, 5)),
    "uneven padding": lambda: ([nn.Conv1d(2, 3, 4, padding="same"), nn.Conv1d(3, 2, 1)], tensor(2, 2, 5)),
    "batch norm": lambda: (
        [nn.Conv2d(2, 3, 3, bias=False), nn.BatchNorm2d(3), nn.ReLU(inplace=True), nn.Conv2d(3, 2, 3)],
        tensor(4, 2, 7, 7),
    ),
    "layer norm": lambda: ([nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)], tensor(5, 3)),
    "lstm": lambda: ([first(nn.LSTM(3, 4, num_layers=2)), nn.Linear(4, 2)], tensor(6, 2, 3)),
    "embedding": lambda: (
        [nn.Embedding(5, 3, padding_idx=1, scale_grad_by_freq=True), nn.Linear(3, 2)],
        indices(4, 6),
    ),
    "sparse embedding": lambda: ([nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2)], indices(4)),
    "attention": lambda: (
        [nn.TransformerEncoderLayer(4, 2, dim_feedforward=8, batch_first=True), nn.Linear(4, 2)],
        tensor(2, 5, 4),
    ),
    "shared module": lambda: ([Shared(3), nn.Linear(3, 2)], tensor(5, 3)),
    "one layer in two places": lambda: (lambda layer: ([layer, nn.Tanh(), layer], tensor(5, 3)))(
        nn.Linear(3, 3)
    ),
    "tied parameters": lambda: ([Tied(5, 3), nn.Linear(5, 2)], indices(4, 6)),
    "tied, one gradient sparse": lambda: ([Tied(5, 3, sparse=True), nn.Linear(5, 2)], indices(4, 6)),
    "frozen": lambda: (
        [frozen(nn.Linear(3, 4)), frozen(nn.Linear(4, 4), "weight"), frozen(nn.Linear(4, 2), "bias")],
        tensor(5, 3),
    ),
    "frozen before": lambda: ([frozen(nn.Embedding(5, 3)), nn.Linear(3, 2)], indices(4)),
    "parametrised": lambda: (
        [nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)), nn.utils.spectral_norm(nn.Linear(4, 2))],
        tensor(5, 3),
    ),
    "dropout": lambda: ([nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Dropout(0.5)], tensor(5, 3)),
    "checkpoint": lambda: (
        [Checkpointed(nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 3)), use_reentrant=False)],
        tensor(5, 3),
    ),
    "reentrant checkpoint": lambda: (
        [
            nn.Linear(3, 3),
            Checkpointed(
                nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 3)), use_reentrant=True
            ),
        ],
        tensor(5, 3),
    ),
    "autograd in the forward": lambda: (
        [nn.Linear(3, 3), Penalised(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)))],
        tensor(5, 3),
    ),
    "autograd in a checkpoint": lambda: (
        [nn.Linear(3, 3), Checkpointed(Penalised(noisy()), use_reentrant=False)],
        tensor(5, 3),
    ),
    "convolution in there": lambda: ([Penalised(nn.Conv1d(2, 2, 3, padding=1)), nn.Tanh()], tensor(2, 2, 5)),
    "autograd in the backward": lambda: ([nn.Linear(3, 3), Implicit(3), nn.Linear(3, 2)], tensor(5, 3)),
    "function transforms": lambda: (
        [Call(lambda x: x), vmapped(nn.Linear(3, 2))],
        tensor(5, 3),
    ),
    "state": lambda: ([Stateful(3), nn.Linear(3, 2)], tensor(5, 3)),
    "nothing trained": lambda: ([nn.ReLU()], tensor(5, 3)),
}


def vmapped(module: nn.Module) -> Call:
    call = Call(lambda x: torch.vmap(module)(x))
    call.module = module
    return call


def case(name: str) -> tuple[list[nn.Module], torch.Tensor]:
    """Make a case's layers, with the same weights each time, and its inputs."""
    torch.manual_seed(3)
    layers, inputs = CASES[name]()
    return [layer.double() for layer in layers], inputs


def stage_of(layers, first_layer=0, **options) -> Stage:
    return Stage(StageModule(layers, first_layer), torch.device("cpu"), seed=1, **options)


def gradients_like(outputs):
    torch.manual_seed(9)
    return [torch.randn_like(t) if t.requires_grad else None for t in tensors_of(outputs)]


def train(stage, inputs, num_microbatches=2, weights=None):
    """Run forwards and backwards of some microbatches; return outputs and gradients of the inputs."""
    results = []
    for m in range(num_microbatches):
        leaf = inputs.detach().clone().requires_grad_(inputs.requires_grad)
        outputs = stage.forward(m, leaf, 0, weights)
        gradients = gradients_like(outputs)
        if stage.split_backward:
            before = [p.grad if p.grad is None else p.grad.clone() for p in stage.module.parameters()]
            of_inputs = stage.backward_input(m, gradients)
            check_same([p.grad for p in stage.module.parameters()], before, tolerance=0)
            stage.backward_weight(m)
        else:
            of_inputs = stage.backward(m, gradients)
        results += [*tensors_of(outputs), *of_inputs]
    assert stage.num_stashed == 0
    return [None if t is None else t.detach() for t in results]


def check_same(ours, theirs, tolerance=1e-12):
    for one, other in zip(ours, theirs, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one.to_dense(), other.to_dense(), rtol=0, atol=tolerance)
