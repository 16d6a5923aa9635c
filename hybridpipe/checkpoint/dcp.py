"""Folders of torch.distributed.checkpoint (DCP): written and read by torch's own API, one tensor at a time.

Not known here: checkpoints and models; imported where it is used, since torch's part takes 0.7 s.
Invariant: torch never unpickles a `.metadata`, but gets the description that `read_description` makes.
"""

import io
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from hybridpipe.checkpoint.description import read_description
from hybridpipe.checkpoint.disk import open_regular, read_bounded
from hybridpipe.checkpoint.names import DCP_METADATA
from hybridpipe.errors import UserError, shown

_MOST_METADATA = 2**30  # bytes; a tensor of one chunk takes some 300


def write_dcp(folder: Path, forms: Mapping[str, Tensor], read: Callable[[str], Tensor]) -> None:
    """Write tensors to a folder, which `torch.distributed.checkpoint.load` reads.

    Args:
        forms: of these only names, types and shapes count.
        read: returns the tensor to write under a name.

    Raises:
        UserError: torch cannot write them.
    """

    class LazySavePlanner(DefaultSavePlanner):
        def lookup_object(self, index: MetadataIndex) -> Any:
            return read(index.fqn)

    with _told(folder, "cannot be written"):
        save(dict(forms), storage_writer=FileSystemWriter(folder), planner=LazySavePlanner(), no_dist=True)


class DcpFolder:
    """A folder of torch.distributed.checkpoint, of any number of ranks, whose tensors are read one by one.

    Args:
        folder: it may also hold other things than tensors, which are not read.

    The attribute `forms` has its tensors on the meta device, by name.

    Raises:
        UserError: its description is damaged, or names code.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, path = folder, folder / DCP_METADATA
        found = read_description(read_bounded(path, _MOST_METADATA), str(path))
        self._reader = _Reader(folder, found)
        with _told(path, "cannot be understood"):
            self.forms = {
                name: torch.empty(each.size, dtype=each.properties.dtype, device="meta")
                for name, each in found.state_dict_metadata.items()
                if isinstance(each, TensorStorageMetadata)
            }
        for name in sorted({each.relative_path for each in found.storage_data.values()}):
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


class _Files(FileSystem):
    """Torch's file system, where a pipe in a file's place is not waited for."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        with open_regular(Path(path)) as (file, _):
            yield io.BufferedReader(cast(io.RawIOBase, file))


class _Reader(FileSystemReader):
    """Torch's reader, with a description that was read before."""

    def __init__(self, folder: Path, description: Metadata) -> None:
        super().__init__(folder)
        self.fs, self._description = _Files(), description

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the description; torch would unpickle what the folder has by now."""
        return self._description


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
