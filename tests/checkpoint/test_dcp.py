"""Folders of torch.distributed.checkpoint, as torch writes and reads them."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from hybridpipe.checkpoint import dcp as dcp_folders
from hybridpipe.checkpoint.dcp import DcpFolder, write_dcp
from hybridpipe.checkpoint.description import read_description
from hybridpipe.checkpoint.names import DCP_METADATA
from hybridpipe.checkpoint.plain import Weights
from hybridpipe.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
PROGRAM = Path(__file__).parent / "programs" / "sharded_dcp.py"


def tensors() -> dict[str, Tensor]:
    torch.manual_seed(0)
    numbers = torch.randn(3, 4)
    return {
        "a.weight": numbers,
        "a.half": numbers.bfloat16(),
        "a.turned": numbers.t(),
        "count": torch.tensor(2**40),
        "mask": torch.tensor([True, False]),
        "none": torch.empty(0, 3),
    }


def forms(of: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: tensor.to("meta") for key, tensor in of.items()}


@pytest.fixture
def folder(tmp_path) -> Path:
    made = tensors()
    write_dcp(tmp_path / "dcp", forms(made), made.__getitem__)
    return tmp_path / "dcp"


def test_torch_reads_what_is_written(folder):
    expected = tensors()
    found = {key: torch.zeros_like(tensor) for key, tensor in expected.items()}
    dcp.load(found, checkpoint_id=folder)
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_tensors_are_read_one_by_one(folder):
    read, expected = DcpFolder(folder), tensors()
    assert read.forms.keys() == expected.keys()
    for key, tensor in expected.items():
        assert (read.forms[key].dtype, read.forms[key].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(read.read(key), tensor)
    turned = torch.zeros(4, 3).t()
    read.overwrite(turned, "a.weight")
    assert torch.equal(turned, expected["a.weight"])


@pytest.fixture(scope="module")
def sharded(tmp_path_factory) -> Path:
    """What two ranks have written."""
    made = tmp_path_factory.mktemp("ranks") / "dcp"
    words = [[sys.executable, str(PROGRAM), str(made), str(rank), "2"] for rank in range(2)]
    jobs = [subprocess.Popen(each, stderr=subprocess.PIPE, text=True) for each in words]
    for job in jobs:
        _, told = job.communicate(timeout=250)
        assert job.returncode == 0, told
    assert len([*made.glob("*.distcp")]) == 2
    return made


@pytest.mark.timeout(300)
def test_a_model_of_several_ranks_is_joined_and_the_rest_is_left(sharded):
    """Its keys have a prefix there, beside the optimizer's state."""
    model = nn.Linear(4, 5)
    weights = Weights(sharded, model.state_dict())
    assert torch.equal(weights.read("weight"), torch.arange(20.0).view(5, 4))
    assert torch.equal(weights.read("bias"), torch.arange(5.0))


@pytest.mark.parametrize("first, second, found", [("", "ema.", ""), ("ema.", "model.", None), ("x", "", "")])
def test_a_model_that_is_there_twice_is_refused_unless_one_has_its_names(tmp_path, first, second, found):
    model = nn.Linear(2, 3).state_dict()
    made = {
        f"{prefix}{key}": tensor + len(prefix) for prefix in (first, second) for key, tensor in model.items()
    }
    write_dcp(tmp_path / "dcp", forms(made), made.__getitem__)
    if found is None:
        with pytest.raises(UserError, match=r"tensors once, and has them under ema\. and model\."):
            Weights(tmp_path / "dcp", model)
    else:
        assert torch.equal(Weights(tmp_path / "dcp", model).read("weight"), model["weight"])


def test_a_damaged_description_is_told_in_one_line(folder):
    path = folder / DCP_METADATA
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(
        UserError, match=r"^[^\n]*/\.metadata: must be torch's description of tensors: [^\n]*$"
    ):
        DcpFolder(folder)


class Evil:
    def __reduce__(self):
        return print, ("run",)


def test_a_description_that_is_exchanged_while_it_is_read_runs_nothing(folder, capsys, monkeypatch):
    """It was looked through in one opening and unpickled from another."""

    def read_then_exchanged(pickle_bytes, source):
        (folder / DCP_METADATA).write_bytes(pickle.dumps(Evil()))
        return read_description(pickle_bytes, source)

    monkeypatch.setattr(dcp_folders, "read_description", read_then_exchanged)
    assert torch.equal(DcpFolder(folder).read("a.weight"), tensors()["a.weight"])
    assert capsys.readouterr().out == ""


@pytest.mark.timeout(20)
def test_a_pipe_that_comes_in_a_files_place_while_the_folder_is_read_is_not_waited_for(folder):
    read = DcpFolder(folder)
    [data] = folder.glob("*.distcp")
    data.unlink()
    os.mkfifo(data)
    with pytest.raises(UserError, match="must be a regular file"):
        read.read("a.weight")


def moved(folder: Path, name: object) -> None:
    """Let the description name another file."""
    description = pickle.loads((folder / DCP_METADATA).read_bytes())
    for info in description.storage_data.values():
        object.__setattr__(info, "relative_path", name)
    (folder / DCP_METADATA).write_bytes(pickle.dumps(description))


def test_a_file_outside_of_the_folder_is_not_read(folder):
    [data] = folder.glob("*.distcp")
    data.rename(folder.parent / data.name)
    moved(folder, f"../{data.name}")
    with pytest.raises(UserError, match=r"files must be in the folder itself, got '\.\./__0_0\.distcp'$"):
        DcpFolder(folder)


@pytest.mark.parametrize("name", ["a\0b", "half a \ud800"])
def test_a_name_that_no_file_can_have_is_told_in_one_line(folder, name):
    moved(folder, name)
    with pytest.raises(
        UserError, match=r"^'[^\n\0]*/(a|half a) ?\\[^\n\0]*': no file can have this name: [^\n\0]*$"
    ):
        DcpFolder(folder)


def test_damaged_and_missing_files_are_told_in_one_line(folder):
    (file,) = folder.glob("*.distcp")
    whole = file.read_bytes()
    file.write_bytes(whole[:100])
    with pytest.raises(UserError) as error:
        DcpFolder(folder).read("a.weight")
    assert str(error.value).startswith(f"{folder}: tensor 'a.weight' cannot be read: ")
    file.unlink()
    with pytest.raises(UserError, match=f"{file}: is missing"):
        DcpFolder(folder)


def test_an_error_of_the_reading_side_stays_the_one_that_is_told(tmp_path):
    def read(name):
        raise UserError(f"{name} was damaged meanwhile")

    with pytest.raises(UserError, match=r"^a.weight was damaged meanwhile$"):
        write_dcp(tmp_path / "dcp", {"a.weight": torch.empty(2, device="meta")}, read)
