import itertools

import pytest
import torch

from hybridpipe.stage.randomness import preserved_state, random_key, seed_generators

CPU = torch.device("cpu")


def draw(*key: int) -> list[float]:
    seed_generators(random_key(*key), CPU)
    return torch.rand(4).tolist()


def test_the_same_key_draws_the_same_numbers():
    first = draw(1, 2, 3, 4)
    torch.rand(7)
    assert draw(1, 2, 3, 4) == first


def test_neighbours_differ():
    keys = {random_key(*key) for key in itertools.product(range(6), repeat=4)}
    assert len(keys) == 6**4
    assert all(0 <= key < 2**63 for key in keys)
    draws = {tuple(draw(*key)) for key in itertools.product(range(2), repeat=4)}
    assert len(draws) == 16


def test_keys_are_the_same_on_every_machine_and_in_every_version():
    assert random_key(0, 0, 0, 0) == 5809880761037817570


def test_the_state_of_the_process_is_preserved():
    torch.manual_seed(5)
    expected = torch.rand(3).tolist()
    torch.manual_seed(5)
    with preserved_state(CPU):
        draw(0, 0, 0, 0)
    assert torch.rand(3).tolist() == expected


def test_the_state_is_preserved_when_a_layer_fails():
    torch.manual_seed(5)
    expected = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError), preserved_state(CPU):
        draw(0, 0, 0, 0)
        raise ZeroDivisionError
    assert torch.equal(torch.get_rng_state(), expected)
