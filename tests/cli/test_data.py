"""Mistakes in a config's data, as the commands that look at the data without training tell them."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hybridpipe.cli.data import in_one_line
from hybridpipe.cli.main import main
from hybridpipe.errors import NotSaved, UserError

CONFIG = """
model = {{ factory = "{0}:Residual" }}
data = {{ factory = "{0}:{1}" }}
optimizer = {{ factory = "torch.optim:SGD", args = {{ lr = 0.1 }} }}
train = {{ minibatch = 8, microbatch = 4 }}
"""
MISTAKES = {
    "missing": "No such file or directory: 'nowhere.npy'",
    "needs_another_package": "No module named 'no_such_package'",
    "other_batches": "dataset is a DataLoader with batch_size = 5, and minibatch_size = 8: make them equal",
    "texts": "of tensors, arrays, numbers, got inputs of type str; or give a collate_fn",
    "other_shapes": "samples of a microbatch are stacked and must have one shape",
}


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.second(self.first(x)) + x[:, :3]


def missing():
    return open("nowhere.npy", "rb")


def needs_another_package():
    raise ModuleNotFoundError("No module named 'no_such_package'", name="no_such_package")


def other_batches():
    return DataLoader(TensorDataset(torch.ones(10, 4), torch.zeros(10, dtype=torch.long)), batch_size=5)


def texts():
    return [("a text", 0)] * 10


def other_shapes():
    return [(torch.ones(4 + i % 2), 0) for i in range(10)]


@pytest.fixture(params=["inspect", "profile", "import"])
def arguments(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    """A command that looks at the data, and its options behind CONFIG."""
    config, weights = str(tmp_path / "train.toml"), tmp_path / "w.safetensors"
    save_file(Residual().state_dict(), weights)
    options = {
        "inspect": [config],
        "profile": [config, "--out", str(tmp_path / "profile.json")],
        "import": [str(weights), config, "--out", str(tmp_path / "run")],
    }
    return [request.param, *options[request.param]]


@pytest.mark.parametrize("data", MISTAKES)
def test_a_mistake_in_the_data_is_told_in_one_line(data, arguments, tmp_path, capsys):
    (tmp_path / "train.toml").write_text(CONFIG.format(__name__, data))
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("hybridpipe: ") and MISTAKES[data] in line
    assert {path.name for path in tmp_path.iterdir()} == {"train.toml", "w.safetensors"}


def test_other_errors_keep_their_traceback():
    with pytest.raises(KeyError), in_one_line(TypeError, ValueError):
        raise KeyError("a mistake inside the user's code")


def test_an_error_that_is_one_line_already_stays():
    with pytest.raises(NotSaved), in_one_line(ValueError):
        raise NotSaved("no space left")
    with pytest.raises(UserError, match="not like this"), in_one_line(ValueError):
        raise ValueError("not like this")
