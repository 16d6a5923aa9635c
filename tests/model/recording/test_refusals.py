"""Refusals: one line each, the user's line first, a remedy at the end."""

import pytest

from hybridpipe.model.recording import refusals


@pytest.mark.parametrize(
    "refusal, line",
    [
        (
            refusals.reads_data("m.py:3", "item"),
            "m.py:3: item reads data that only one stage has "
            "(keep it a tensor, as torch.where does, or do it inside a module)",
        ),
        (
            refusals.reads_data("m.py:3", "nonzero"),
            "m.py:3: nonzero reads data that only one stage has "
            "(multiply by a mask, or do it inside a module)",
        ),
        (
            refusals.hides_tensors("m.py:3: an argument of f", "Box"),
            "m.py:3: an argument of f holds tensors in a Box, which is no pytree "
            "(use a tuple, a dict or a list)",
        ),
        (
            refusals.hides_tensors("the model's output", "DynamicCache"),
            "the model's output holds tensors in a DynamicCache, which is no pytree (pass use_cache=False)",
        ),
        (
            refusals.hooked_and_opened("blocks", "Blocks"),
            "blocks (Blocks) has hooks, which would run at the recording only "
            "(register them on its children)",
        ),
    ],
)
def test_the_line(refusal, line):
    assert str(refusal) == line
