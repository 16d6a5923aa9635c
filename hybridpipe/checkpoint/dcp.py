"""Folders of torch.distributed.checkpoint (DCP): written and read by torch's own API, one tensor at a time.

Not known here: checkpoints and models. Invariant: torch unpickles a folder's `.metadata`, so that is looked
through first, without running it, and what names more than torch's descriptions of tensors is refused.
"""

import math
import pickletools
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from hybridpipe.checkpoint.disk import open_regular, read_bounded
from hybridpipe.errors import UserError, shown

METADATA = ".metadata"
_MOST_METADATA = 2**30  # bytes; a tensor of one chunk takes some 300
_DTYPES = {str(each).removeprefix("torch.") for each in vars(torch).values() if isinstance(each, torch.dtype)}
_ALLOWED = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", *_DTYPES},
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},  # Python 3.13
}
_STRINGS = {"SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"}


def is_dcp(folder: Path) -> bool:
    """True if the folder is one of torch.distributed.checkpoint."""
    return (folder / METADATA).exists()


def write_dcp(folder: Path, forms: Mapping[str, Tensor], read: Callable[[str], Tensor]) -> None:
    """Write tensors to a folder, which `torch.distributed.checkpoint.load` reads.

    Args:
        forms: of these only names, types and shapes count.
        read: returns the tensor to write under a name.

    Raises:
        UserError: torch cannot write them.
    """

    class Planner(DefaultSavePlanner):
        def lookup_object(self, index: MetadataIndex) -> Any:
            return read(index.fqn)

    with _told(folder, "cannot be written"):
        save(dict(forms), storage_writer=FileSystemWriter(folder), planner=Planner(), no_dist=True)


class DcpFolder:
    """A folder of torch.distributed.checkpoint, of any number of ranks, whose tensors are read one by one.

    Args:
        folder: it may also hold other things than tensors, which are not read.

    The attribute `forms` has its tensors on the meta device, by name.

    Raises:
        UserError: its description is damaged, or names code.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._reader, path = folder, _Reader(folder), folder / METADATA
        _look_through(read_bounded(path, _MOST_METADATA), str(path))
        with _told(path, "cannot be understood"):
            found = self._reader.read_metadata()
            self.forms = {
                name: _form(each, f"{path}: tensor {shown(name)}")
                for name, each in found.state_dict_metadata.items()
                if isinstance(each, TensorStorageMetadata)
            }
            files = {str(each.relative_path) for each in found.storage_data.values()}
        for name in sorted(files):
            if name != Path(name).name:
                raise UserError(f"{path}: files must be in the folder itself, got {shown(name)}")
            with open_regular(folder / name):  # a pipe in its place would be waited for
                pass

    def read(self, name: str) -> Tensor:
        """Return one tensor, on the CPU; UserError if its file is damaged."""
        tensor = torch.empty(self.forms[name].size(), dtype=self.forms[name].dtype)
        self.overwrite(tensor, name)
        return tensor

    def overwrite(self, tensor: Tensor, name: str) -> None:
        """Read one tensor into one of the same shape and type."""
        with _told(self._folder, f"tensor {shown(name)} cannot be read"):
            load({name: tensor.detach()}, storage_reader=self._reader, no_dist=True)


def _form(tensor: TensorStorageMetadata, where: str) -> Tensor:
    """Return a tensor's form; UserError if parts of it are missing, as torch would leave those unset."""
    form = torch.empty(tensor.size, dtype=tensor.properties.dtype, device="meta")
    count = sum(math.prod([*part.sizes]) for part in tensor.chunks)
    if count != form.numel():
        raise UserError(f"{where}: its parts must have {form.numel()} elements together, got {count}")
    return form


class _Reader(FileSystemReader):
    """Torch's reader, which reads the description of a folder once for all tensors."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the description, which was looked through."""
        if self._metadata is None:
            self._metadata = super().read_metadata(*args, **kwargs)
        return self._metadata


@contextmanager
def _told(path: Path, what: str) -> Iterator[None]:
    """Turn whatever torch raises into a UserError; it has no errors of its own for damaged files."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process: as is meant
            yield
    except UserError:
        raise
    except (Exception, CheckpointException) as error:  # the latter is no Exception
        first = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
        if isinstance(first, UserError):
            raise first from None
        raise UserError(f"{path}: {what}: {type(first).__name__}: {shown(str(first))}") from None


def _look_through(pickle: bytes, source: str) -> None:
    """Raise UserError for a pickle that names anything but what torch writes, or hides what it names."""
    try:
        names = list(_names(pickle))
    except Exception as error:  # of pickletools, for any bytes
        raise UserError(f"{source}: must be torch's description of tensors: {shown(str(error))}") from None
    for module, name in names:
        if name not in _ALLOWED.get(module, ()):
            what = f"names {shown(f'{module}.{name}')}, which may run code"
            raise UserError(f"{source}: {what}; must name torch's descriptions of tensors only")


def _names(pickle: bytes) -> Iterator[tuple[str, str]]:
    """Yield module and name of each object that a pickle refers to.

    A name that is computed, so that only running the pickle would tell it, is "?".
    """
    top: tuple[str | None, str | None] = (None, None)  # the stack's last two, where they are strings
    memo: dict[int, str | None] = {}
    argument: Any
    for opcode, argument, _ in pickletools.genops(pickle):
        match opcode.name:
            case "PROTO" | "FRAME":
                pass
            case "MEMOIZE":
                memo[len(memo)] = top[1]
            case "PUT" | "BINPUT" | "LONG_BINPUT":
                memo[argument] = top[1]
            case "GET" | "BINGET" | "LONG_BINGET":
                top = (top[1], memo.get(argument))
            case name if name in _STRINGS:
                top = (top[1], argument)
            case "STACK_GLOBAL":
                yield top[0] or "?", top[1] or "?"
                top = (None, None)
            case "GLOBAL" | "INST":
                module, _, name = argument.partition(" ")
                yield module, name
                top = (None, None)
            case "EXT1" | "EXT2" | "EXT4" | "PERSID" | "BINPERSID":
                yield "?", opcode.name
            case _:
                top = (None, None)
