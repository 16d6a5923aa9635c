"""What one pass of all layers tells: who stands for whom, and what is relayed."""

import torch
from torch import nn

from hybridpipe.measure import turns
from hybridpipe.measure.layers import Rehearsal, measure
from hybridpipe.measure.observed import observe, stand_ins, total_bytes
from hybridpipe.model.layers import layers_of

FLOAT = 4  # bytes


class Repeated(nn.Linear):
    """A layer whose amount of work is a number of its own."""

    def __init__(self, width: int, times: int) -> None:
        super().__init__(width, width)
        self.times, self.calls = times, 0

    def forward(self, value):
        self.calls += 1
        for _ in range(self.times):
            value = torch.tanh(super().forward(value))
        return value


class Skipping(nn.Module):
    """A U-Net in short: the first result is used by the last layer but one."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.low, self.middle = nn.Linear(4, 8), nn.Linear(8, 2), nn.Linear(2, 2)
        self.up, self.join, self.head = nn.Linear(2, 8), nn.Linear(16, 8), nn.Linear(8, 3)

    def forward(self, value):
        skip = self.down(value)
        up = self.up(self.middle(self.low(skip)))
        return self.head(self.join(torch.cat([up, skip], dim=1)))


def rehearsal(*layers: nn.Module) -> Rehearsal:
    model, inputs = nn.Sequential(*layers), torch.randn(5, 6)
    return Rehearsal(layers_of(model, inputs), inputs, torch.randn(5, 6), nn.functional.mse_loss)


def standing_in(made: Rehearsal) -> list[int]:
    return stand_ins(made.stages, [observe(made.stages, made.inputs, made.targets)])


def test_the_first_of_equal_layers_stands_for_all():
    """The first receives what needs no gradient, and behind the last follows the loss."""
    assert standing_in(rehearsal(*(nn.Linear(6, 6) for _ in range(5)))) == [0, 1, 1, 1, 4]


def test_layers_that_keep_more_do_more_whatever_they_look_like():
    times = 1, 1, 1, 3, 1, 1
    assert standing_in(rehearsal(*(Repeated(6, n) for n in times))) == [0, 1, 1, 3, 1, 5]


def test_equal_layers_are_measured_once(monkeypatch):
    monkeypatch.setattr(turns, "MAX_REPEATS", 3)
    made = rehearsal(*(Repeated(6, 1) for _ in range(4)))
    first, second = made.measure(lambda parameters: torch.optim.SGD(parameters, lr=0.1)).layers[1:3]
    calls = [stage.module[0].calls for stage in made.stages]
    assert calls[2] == 1 and calls[0] == calls[1] == calls[3] > 10
    assert first.forward_seconds == second.forward_seconds > 0
    assert first.backward_seconds == second.backward_seconds > 0
    assert (first.name, second.name) == ("1", "2") and first.update_seconds > 0 < second.update_seconds


def test_what_passes_through_a_layer_is_charged_to_it():
    """Behind `down` one tensor crosses; from there to `up` the skip is relayed beside each layer's own."""
    model, inputs, targets = Skipping(), torch.randn(5, 4), torch.randn(5, 3)
    profile = measure(model, inputs, targets, nn.functional.mse_loss)
    assert [layer.name for layer in profile.layers] == ["down", "low", "middle", "up", "join", "head"]
    widths = [8, 2 + 8, 2 + 8, 8 + 8, 8]
    assert [layer.output_bytes for layer in profile.layers] == [5 * width * FLOAT for width in widths] + [0]
    assert [layer.gradient_bytes for layer in profile.layers] == [5 * width * FLOAT for width in widths] + [0]


def test_sparse_gradients_are_no_hindrance():
    """Torch does not tell the bytes of a sparse tensor."""
    model, inputs = (
        nn.Sequential(nn.EmbeddingBag(50, 6, sparse=True), nn.Linear(6, 6)),
        torch.ones(5, 3).long(),
    )
    made = Rehearsal(layers_of(model, inputs), inputs, torch.randn(5, 6), nn.functional.mse_loss)
    profile = made.measure(lambda parameters: torch.optim.Adagrad(parameters, lr=0.1))
    assert profile.layers[0].parameter_bytes == 50 * 6 * FLOAT and profile.state_factor == 1
    sparse = torch.sparse_coo_tensor([[1, 4]], torch.ones(2, 6), (50, 6), check_invariants=True)
    assert total_bytes([sparse, torch.ones(3)]) == (2 * 6 + 3) * FLOAT + 2 * 8
