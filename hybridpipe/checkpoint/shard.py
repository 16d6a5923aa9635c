"""Shards: safetensors files of tensors and a JSON value, hashed while they are written and read.

Invariant: no pickle, and no memory is allocated before the header is known to cover every byte of the file.
safetensors' own functions read these files, but would need a second pass for the hash.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from hybridpipe.checkpoint import header
from hybridpipe.checkpoint.directory import abandon
from hybridpipe.checkpoint.disk import NewFile, compare, open_regular, read_into
from hybridpipe.checkpoint.manifest import JSON, FileEntry, check_json, parse_json
from hybridpipe.checkpoint.names import parse_name
from hybridpipe.errors import UserError, shown
from hybridpipe.health import faults
from hybridpipe.model.tensors import overwrite

__all__ = ["FileEntry", "PlainFile", "plain_order", "read_shard", "write_plain", "write_shard"]

_META = "hybridpipe-shard/1"  # the name of the JSON text among the header's metadata
_PLAIN = {"format": "pt"}  # expected by other readers of safetensors files
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def write_shard(path: Path, tensors: Mapping[str, Tensor], meta: JSON) -> FileEntry:
    """Write a new file and fsync it. Tensors may have any device and any strides.

    Args:
        meta: any JSON value. Infinities and NaN are kept; tuples become lists.

    Raises:
        TypeError: `meta` is no JSON value.
        UserError: the file cannot be written, or safetensors lacks a tensor's dtype. The checkpoint cannot be
            completed then, so its temporary directory is removed as well.
    """
    check_json(meta, "meta")
    directory = parse_name(path.parent)
    try:
        return _write(path, tensors, {**_PLAIN, _META: json.dumps(meta)}).entry
    except UserError:
        if directory is not None and directory.state == "tmp":
            abandon(path.parent.parent, directory.step)
        raise


def read_shard(path: Path, entry: FileEntry | None) -> tuple[dict[str, Tensor], JSON]:
    """Tensors of a shard, on the CPU, and its JSON value.

    Args:
        entry: the manifest's entry, whose length and hash are checked; None for no check.

    Raises:
        UserError: the file is damaged, or no shard.
    """
    tensors, metadata = _read(path, entry)
    return tensors, _json_of(metadata, path)


def _json_of(metadata: Mapping[str, str], path: Path) -> JSON:
    if _META not in metadata:
        raise UserError(f"{path}: must be a checkpoint's file, got one without {_META!r} in its metadata")
    return parse_json(metadata[_META], f"{path}: {_META}")


def write_plain(
    path: Path, tensors: Mapping[str, Tensor], read: Callable[[str], Tensor] | None = None
) -> None:
    """Write a file of tensors alone, as `safetensors.torch.save_file` does; raises as `write_shard`.

    Args:
        tensors: with `read`, of these only types and shapes count.
        read: returns the tensor to write under a name; called in the order of `plain_order`.
    """
    _write(path, tensors, _PLAIN, read)


def plain_order(path: Path, tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the order in which `write_plain` writes these tensors; UserError if it cannot."""
    return [slot.name for slot in header.encode(_listed(path, tensors), {})[1]]


def _listed(path: Path, tensors: Mapping[str, Tensor]) -> list[tuple[str, str, tuple[int, ...]]]:
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES or tensor.layout != torch.strided or name == header.METADATA:
            what = f"{tensor.dtype}, {tensor.layout}"
            raise UserError(f"{path}: tensor {shown(name)}: safetensors cannot hold it: {what}")
    return [(name, _NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()]


class PlainFile:
    """A safetensors file, whose tensors are read one by one, and its hash is not compared.

    Args:
        path: of any safetensors file.

    The attribute `forms` has its tensors on the meta device, by name.

    Raises:
        UserError: it is no such file.
    """

    def __init__(self, path: Path) -> None:
        with open_regular(path) as (file, size):
            slots, self._metadata, head = _read_header(file, size, path)
        self._path, self._num_bytes, self._start = path, size, len(head)
        self._slots = {slot.name: slot for slot in slots}
        self.forms = {
            slot.name: torch.empty(slot.shape, dtype=_DTYPES[slot.dtype], device="meta") for slot in slots
        }

    @property
    def value(self) -> JSON:
        """The JSON value of a checkpoint's file; UserError if it is none."""
        return _json_of(self._metadata, self._path)

    def read(self, name: str) -> Tensor:
        """Return one tensor, on the CPU; UserError if the file has another length by now."""
        form = self.forms[name]
        tensor = torch.empty(form.size(), dtype=form.dtype)
        self.overwrite(tensor, name)
        return tensor

    def overwrite(self, tensor: Tensor, name: str) -> None:
        """Read one tensor into one of the same shape and type, without memory of its own if possible."""
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            overwrite(tensor, self.read(name))
            return
        with open_regular(self._path) as (file, size):
            if size != self._num_bytes:
                raise UserError(f"{self._path}: must have {self._num_bytes:,} bytes as before, got {size:,}")
            file.seek(self._start + self._slots[name].start)
            read_into(file, _bytes_of(tensor.detach()), self._path)
        _check_bool(self._path, name, tensor)


def _write(
    path: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    read: Callable[[str], Tensor] | None = None,
) -> NewFile:
    read = read or tensors.__getitem__
    listed = _listed(path, tensors)
    try:
        head, slots = header.encode(listed, metadata)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None
    directory = parse_name(path.parent)
    step = directory.step if directory else None
    with NewFile(path) as file:
        file.write(head)
        faults.at("save-shard", step=step)  # while a part of the file exists
        for slot in slots:
            file.write(_bytes_of(read(slot.name).detach().cpu().contiguous()))
    faults.at("save-shard-written", step=step)
    return file


def _read(path: Path, entry: FileEntry | None) -> tuple[dict[str, Tensor], dict[str, str]]:
    with open_regular(path) as (file, size):
        if entry is not None and size != entry.num_bytes:  # before the header is trusted
            raise UserError(f"{path}: must have {entry.num_bytes:,} bytes, got {size:,}")
        slots, metadata, head = _read_header(file, size, path)
        digest = hashlib.sha256(head)
        tensors = {}
        for slot in slots:
            tensors[slot.name] = _read_tensor(file, slot, path)
            digest.update(_bytes_of(tensors[slot.name]))
    if entry is not None:
        compare(path, FileEntry(entry.name, size, digest.hexdigest()), entry)
    for name, tensor in tensors.items():
        _check_bool(path, name, tensor)
    return tensors, metadata


def _read_header(file: BinaryIO, size: int, path: Path) -> tuple[list[header.Slot], dict[str, str], bytes]:
    length = file.read(header.LENGTH_BYTES)
    text = bytearray(header.check_length(length, size, str(path)))
    read_into(file, memoryview(text), path)
    data_bytes = size - header.LENGTH_BYTES - len(text)
    slots, metadata = header.decode(bytes(text), data_bytes, str(path))
    return slots, metadata, length + text


def _read_tensor(file: BinaryIO, slot: header.Slot, path: Path) -> Tensor:
    tensor = torch.empty(slot.shape, dtype=_DTYPES[slot.dtype])
    read_into(file, _bytes_of(tensor), path)
    return tensor


def _check_bool(path: Path, name: str, tensor: Tensor) -> None:
    if tensor.dtype == torch.bool and tensor.view(torch.uint8).gt(1).any():
        raise UserError(f"{path}: tensor {shown(name)}: BOOL must be bytes of 0 and 1")


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data
