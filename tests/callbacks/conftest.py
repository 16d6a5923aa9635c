"""Trainers of a small model, as in the tests of the trainer."""

from tests.training.conftest import make

__all__ = ["make"]
