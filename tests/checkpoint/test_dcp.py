"""Folders of torch.distributed.checkpoint, as torch writes and reads them."""

import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from hybridpipe.checkpoint.dcp import METADATA, DcpFolder, write_dcp
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


class Evil:
    def __reduce__(self):
        return print, ("run",)


class Hidden:
    """Names what it runs by a string that is computed."""

    def __reduce__(self):
        return eval, ("print('run')",)


@pytest.mark.parametrize(
    "made, named",
    [
        (pickle.dumps(Evil()), "'builtins.print'"),
        (pickle.dumps(Evil(), protocol=0), "'__builtin__.print'"),
        (pickle.dumps(Evil(), protocol=2), "'__builtin__.print'"),
        (pickle.dumps({"a": [Hidden()]}), "'builtins.eval'"),
        (b"\x80\x04\x8c\x02os\x940\x8c\x06system\x94h\x00h\x01\x93.", "'os.system'"),  # from the memo
        (b"\x80\x04\x8c\x05torch\x8c\x04Size\x8c\x02os\x8c\x06system\x93.", "'os.system'"),
        (
            b"\x80\x04\x8c\x02os\x8c\x06system\x8c\x05torch\x8c\x04Size00\x93.",
            "'?.?'",
        ),  # dropped
        (b"\x80\x04\x8c\x02os\x8c\x06system\x8c\x05torch\x94\x8c\x04Size\x940h\x00h\x010\x93.", "'?.?'"),
        (b"\x80\x04(\x8c\x02os\x8c\x06systemt\x93.", "'?.?'"),
        (b"(ios\nsystem\n.", "'os.system'"),
        (b"\x82\x01.", "'?.EXT1'"),
        (pickle.dumps(torch.nn.Linear), "'torch.nn.modules.linear.Linear'"),
    ],
)
def test_a_description_that_could_run_code_is_refused_before_torch_reads_it(folder, capsys, made, named):
    (folder / METADATA).write_bytes(made)
    with pytest.raises(UserError) as told:
        DcpFolder(folder)
    assert str(told.value).startswith(
        f"{folder}/.metadata: names {named}, which may run code; must name torch's"
    )
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "damage, told",
    [
        (lambda found: found[:-1], "must be torch's description of tensors: 'pickle exhausted"),
        (lambda found: b"", "must be torch's description of tensors: 'pickle exhausted"),
        (lambda found: pickle.dumps({"a": 1}), "cannot be understood: AttributeError"),
    ],
)
def test_a_damaged_description_is_told_in_one_line(folder, damage, told):
    path = folder / METADATA
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UserError) as error:
        DcpFolder(folder).read("a.weight")
    assert str(folder) in str(error.value) and told in str(error.value) and "\n" not in str(error.value)


def test_a_part_that_no_rank_has_written_is_told(folder):
    metadata = dcp.FileSystemReader(folder).read_metadata()
    metadata.state_dict_metadata["a.weight"].chunks[0].sizes = torch.Size([2, 4])
    with open(folder / METADATA, "wb") as file:
        pickle.dump(metadata, file)
    with pytest.raises(UserError, match=r"'a.weight': its parts must have 12 elements together, got 8"):
        DcpFolder(folder)


def test_a_file_outside_of_the_folder_is_not_read(folder):
    description = pickle.loads((folder / METADATA).read_bytes())
    [data] = folder.glob("*.distcp")
    data.rename(folder.parent / data.name)
    for info in description.storage_data.values():
        object.__setattr__(info, "relative_path", f"../{data.name}")
    (folder / METADATA).write_bytes(pickle.dumps(description))
    with pytest.raises(UserError, match=r"files must be in the folder itself, got '\.\./__0_0\.distcp'$"):
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
