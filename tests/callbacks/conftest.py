"""Trainers of a small model for the tests of this folder; some files have a `make` of their own."""

import pytest

from tests.training.helpers import cross_entropy, mlp, momentum, whole


@pytest.fixture
def make(make_trainer):
    def trainer(model=None, **options):
        given = {"loss": cross_entropy, "optimizer": momentum, "plan": whole(), "minibatch_size": 8}
        return make_trainer(mlp() if model is None else model, **(given | options))

    return trainer
