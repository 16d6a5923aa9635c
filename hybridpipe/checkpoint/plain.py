"""Plain weights: a model's `state_dict()` alone, in files and folders that other programs write.

Checkpoints are not known here. Invariant: what is read fits the model in every name, type and shape, and no
more than one tensor is in memory beside the model's own.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from hybridpipe.checkpoint.names import DCP_METADATA
from hybridpipe.checkpoint.shard import PlainFile
from hybridpipe.errors import UserError, shown
from hybridpipe.files import read_object
from hybridpipe.model.tensors import tied
from hybridpipe.stage.state import check_fits, described

if TYPE_CHECKING:
    from hybridpipe.checkpoint.dcp import DcpFolder

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"  # files of save_pretrained


class Weights:
    """A model's weights in files, which are read one by one.

    A tied weight is known under all of its keys: `safetensors.torch.save_model` writes it under one only.

    Args:
        source: a safetensors file, a folder as Hugging Face's `save_pretrained` writes it, or one of
            torch.distributed.checkpoint. The latter may hold more than the model, such as the optimizer's
            state, and the model's keys may have a prefix there: `model.`, say.
        model: its `state_dict()`.

    Raises:
        UserError: a file is damaged or none of these, or a tensor's type, shape or name is not the model's.
    """

    def __init__(self, source: Path, model: Mapping[str, Tensor]) -> None:
        self._tensors: dict[str, tuple[PlainFile | DcpFolder, str]] = {}
        if source.is_dir() and _is_dcp(source):
            folder = _dcp_folder(source)
            named = _of_model(folder.forms, model, source)
            self._tensors |= {key: (folder, name) for key, name in named.items()}
        else:
            for file in map(PlainFile, _files_of(source)):
                self._tensors |= {name: (file, name) for name in file.forms}
        names = tied(model)
        written = {names.get(key, key): entry for key, entry in self._tensors.items() if key in model}
        for key in model:
            if key not in self._tensors and names.get(key, key) in written:
                self._tensors[key] = written[names.get(key, key)]
        found = {key: file.forms[name] for key, (file, name) in self._tensors.items()}
        check_fits(described(found), model, str(source))

    def read(self, key: str) -> Tensor:
        """Return one tensor, on the CPU (`PlainFile.read`)."""
        file, name = self._tensors[key]
        return file.read(name)

    def overwrite(self, tensor: Tensor, key: str) -> None:
        """Read one tensor into the model's (`PlainFile.overwrite`)."""
        file, name = self._tensors[key]
        file.overwrite(tensor, name)


def is_weights(source: Path) -> bool:
    """True if the path is that of a file of weights, or of a folder of them (`Weights`)."""
    of_folder = any((source / name).exists() for name in (WHOLE, INDEX)) or _is_dcp(source)
    return source.suffix == ".safetensors" or of_folder


def _dcp_folder(source: Path) -> "DcpFolder":
    from hybridpipe.checkpoint import dcp

    return dcp.DcpFolder(source)


def _is_dcp(folder: Path) -> bool:
    return (folder / DCP_METADATA).exists()


def _files_of(source: Path) -> list[Path]:
    if not source.is_dir():
        return [source]
    if (source / WHOLE).exists():
        return [source / WHOLE]
    index = source / INDEX
    if not index.exists():
        what = f"{WHOLE} or {INDEX} (save_pretrained), or {DCP_METADATA} (torch.distributed.checkpoint)"
        raise UserError(f"{source}: must hold {what}")
    names = read_object(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise UserError(f"{index}: weight_map: must map names of tensors to files, got {shown(names)}")
    return [source / Path(name).name for name in dict.fromkeys(names.values())]


def _of_model(names: Collection[str], model: Mapping[str, Tensor], source: Path) -> dict[str, str]:
    """Return the name in a DCP folder of each of the model's tensors that it has.

    Raises:
        UserError: the model is there twice, under two prefixes.
    """
    alike = tied(model)
    needed = [key for key in model if key not in alike]
    candidates = [name.removesuffix(key) for key in needed[:1] for name in names if name.endswith(f".{key}")]
    fitting = [prefix for prefix in ("", *candidates) if all(prefix + key in names for key in needed)]
    if len(fitting) > 1 and fitting[0]:
        both = " and ".join(fitting[:2])
        raise UserError(f"{source}: must hold the model's tensors once, and has them under {both}")
    prefix = fitting[0] if fitting else ""
    return {key: prefix + key for key in model if prefix + key in names}
