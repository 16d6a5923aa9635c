import math
import re
from dataclasses import replace

import pytest

from .helpers import layer, model


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: layer(forward=-1.0), "forward_seconds must be a finite number >= 0, got -1.0"),
        (lambda: layer(backward=math.nan), "backward_seconds must be a finite number >= 0, got nan"),
        (lambda: layer(update=math.inf), "update_seconds must be a finite number >= 0, got inf"),
        (lambda: layer(forward="1"), "forward_seconds must be a finite number >= 0, got '1'"),
        (lambda: layer(parameters=1.5), "parameter_bytes must be an integer >= 0, got 1.5"),
        (lambda: layer(output=-1), "output_bytes must be an integer >= 0, got -1"),
        (lambda: layer(activation=True), "activation_bytes must be an integer >= 0, got True"),
        (lambda: model(), "layers must hold at least one layer, got none"),
        (lambda: model(layer(), samples=0), "samples must be an integer >= 1, got 0"),
        (lambda: model(layer(), state_factor=-1), "state_factor must be a finite number >= 0, got -1"),
        (lambda: replace(model(layer()), format="x"), "format must be 'hybridpipe-profile/1', got 'x'"),
    ],
)
def test_a_mistake_is_named(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


def test_prefix_sums_give_the_cost_of_consecutive_layers():
    sums = model(layer(1), layer(10), layer(100)).prefix_sums(lambda one: one.forward_seconds)
    assert sums == [0, 1, 11, 111]
    assert sums[3] - sums[1] == 110


def test_a_larger_microbatch_scales_compute_and_activations_but_not_weights():
    profile = model(layer(1, 2, parameters=40, output=6, activation=3, update=5), samples=4)
    assert profile.scaled_to(10) == model(
        layer(2.5, 5, parameters=40, output=15, activation=8, update=5), samples=10
    )
    assert profile.scaled_to(4) is profile
