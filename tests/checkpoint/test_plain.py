"""Weights that other programs have written, in one file or several."""

import json

import pytest
import torch

from hybridpipe.checkpoint.plain import INDEX, Weights
from hybridpipe.errors import UserError


@pytest.mark.parametrize("name", ["a\0b.safetensors", "half of \ud800.safetensors"])
def test_an_index_with_a_name_that_no_file_can_have_is_told_in_one_line(tmp_path, name):
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.raises(UserError) as told:
        Weights(tmp_path, {"w": torch.zeros(1)})
    line = str(told.value)
    assert line.startswith(f"'{tmp_path}/") and "': no file can have this name: " in line
    assert line.isprintable()
