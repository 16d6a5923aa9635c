"""The whole model as one file, in a world of one rank; tests/mpi writes it from several stages."""

import pytest
import torch
from safetensors.torch import load_file

from hybridpipe.checkpoint.whole import write_whole
from hybridpipe.errors import UserError
from tests.training.helpers import cross_entropy, mlp, momentum, whole


@pytest.fixture
def trained(make_trainer):
    """Return a function that makes the trainer of a model with this buffer beside its weights."""

    def make(buffer):
        model = mlp()
        model[0].register_buffer("buffer", buffer)
        return make_trainer(model, loss=cross_entropy, optimizer=momentum, plan=whole(), minibatch_size=8)

    return make


@pytest.mark.parametrize("buffer", [torch.tensor([True, False]), torch.arange(6.0).reshape(2, 3).T])
def test_the_file_is_the_state_in_an_order_of_its_own(trained, tmp_path, buffer):
    trainer, path = trained(buffer), tmp_path / "model.safetensors"
    path.write_text("an earlier one")
    write_whole(trainer.worker, path)
    expected, found = trainer.full_state_dict(), load_file(path)
    assert list(found) != list(expected) and found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_a_tensor_that_a_file_cannot_hold_is_told(trained, tmp_path):
    trainer = trained(torch.zeros(2, dtype=torch.complex128))
    with pytest.raises(UserError, match=r"tensor '0.buffer': safetensors cannot hold it: torch.complex128"):
        write_whole(trainer.worker, tmp_path / "model.safetensors")
    assert not list(tmp_path.iterdir())
