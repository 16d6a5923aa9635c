import itertools
import random

import numpy as np
import pytest
import torch
from torch import nn

from hybridpipe.model.rng import may_draw_from_python, preserved_state, random_key, seed_generators

CPU = torch.device("cpu")


def draw(*key: int) -> list[float]:
    seed_generators(random_key(*key), CPU, python_too=True)
    return [*torch.rand(4).tolist(), random.random(), random.gauss(0, 1), *np.random.standard_normal(3)]


def test_the_same_key_draws_the_same_numbers():
    first = draw(1, 2, 3, 4)
    torch.rand(7), random.gauss(0, 1), np.random.standard_normal(4)
    assert draw(1, 2, 3, 4) == first


def test_neighbours_differ():
    keys = {random_key(*key) for key in itertools.product(range(6), repeat=4)}
    assert len(keys) == 6**4
    assert all(0 <= key < 2**63 for key in keys)
    draws = {tuple(draw(*key)) for key in itertools.product(range(2), repeat=4)}
    assert len(draws) == 16


def test_keys_are_the_same_on_every_machine_and_in_every_version():
    assert random_key(0, 0, 0, 0) == 5809880761037817570


def process_draws() -> list[float]:
    """Draw an odd number of normal numbers, since generators make them in pairs and keep one."""
    return [*torch.rand(3).tolist(), random.gauss(0, 1), *np.random.standard_normal(3)]


def test_the_state_of_the_process_is_preserved():
    def drawn(in_between: bool) -> list[float]:
        torch.manual_seed(5), random.seed(5), np.random.seed(5)
        first = process_draws()
        if in_between:
            with preserved_state(CPU, python_too=True):
                draw(0, 0, 0, 0)
        return [*first, *process_draws()]

    assert drawn(in_between=True) == drawn(in_between=False)


def test_the_state_is_preserved_when_a_layer_fails():
    torch.manual_seed(5)
    expected = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError), preserved_state(CPU, python_too=False):
        draw(0, 0, 0, 0)
        raise ZeroDivisionError
    assert torch.equal(torch.get_rng_state(), expected)


class Own(nn.Module):
    pass


def hooked() -> nn.Module:
    module = nn.Linear(2, 2)
    module.register_forward_hook(lambda *_: None)
    return module


@pytest.mark.parametrize(
    "function, may",
    [
        (nn.Sequential(nn.Linear(2, 2), nn.Dropout()), False),
        (nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)), False),
        (nn.functional.cross_entropy, False),
        (nn.CrossEntropyLoss(), False),
        (nn.Sequential(nn.Linear(2, 2), Own()), True),
        (hooked(), True),
        (lambda outputs, targets: outputs, True),
    ],
    ids=[
        "torch's",
        "parametrised",
        "torch's loss",
        "loss module",
        "a user's inside",
        "hooked",
        "a user's loss",
    ],
)
def test_only_what_users_write_may_draw_from_python(function, may):
    assert may_draw_from_python(function) is may
