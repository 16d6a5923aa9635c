"""Header of a safetensors file, before the bytes of its tensors. Pure: bytes in, bytes out.

Invariant: a header that `decode` accepts covers every data byte of the file exactly once, so that no
memory is allocated for bytes that the file does not have.
Source: https://huggingface.co/docs/safetensors, "Format".
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hybridpipe.checkpoint.manifest import parse_json
from hybridpipe.errors import UserError, shown, suggest

LENGTH_BYTES = 8  # the header's length, little endian, stands before it
LARGEST_HEADER = 100_000_000  # bytes; safetensors' own limit
METADATA = "__metadata__"
MOST_AXES = 64  # of a tensor, as in torch's own loops

ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
    "U64": 8, "U32": 4, "U16": 2, "C64": 8, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Slot:
    """One tensor, whose bytes are `[start, stop)` of the data after the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def encode(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[bytes, list[Slot]]:
    """Length and header of a file with these tensors (name, dtype, shape), and the tensors' places in it.

    Raises:
        ValueError: the header would be longer than LARGEST_HEADER.
    """
    slots: list[Slot] = []
    # Widest items first, as safetensors does: every tensor is then aligned in a memory-mapped file.
    for name, dtype, shape in sorted(tensors, key=lambda each: (-ITEM_BYTES[each[1]], each[0])):
        start = slots[-1].stop if slots else 0
        slots.append(Slot(name, dtype, shape, start, start + ITEM_BYTES[dtype] * math.prod(shape)))
    document: dict[str, Any] = {METADATA: dict(metadata)}
    for slot in slots:
        document[slot.name] = {
            "dtype": slot.dtype,
            "shape": slot.shape,
            "data_offsets": [slot.start, slot.stop],
        }
    text = json.dumps(document, separators=(",", ":")).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)
    if len(text) > LARGEST_HEADER:
        raise ValueError(f"a header must have at most {LARGEST_HEADER:,} bytes, got {len(text):,}")
    return len(text).to_bytes(LENGTH_BYTES, "little") + text, slots


def check_length(length: bytes, file_bytes: int, source: str) -> int:
    """Length of the header in bytes, from the first bytes of a file; UserError if the file is shorter."""
    if len(length) < LENGTH_BYTES:
        raise UserError(f"{source}: must be a safetensors file, got {file_bytes} bytes")
    num_bytes = int.from_bytes(length, "little")
    if num_bytes > min(file_bytes - LENGTH_BYTES, LARGEST_HEADER):
        raise UserError(
            f"{source}: must be a safetensors file: its header should have {num_bytes:,} bytes, "
            f"and the file has {file_bytes:,}"
        )
    return num_bytes


def decode(text: bytes, data_bytes: int, source: str) -> tuple[list[Slot], dict[str, str]]:
    """Tensors of a header, in the order of their bytes, and its metadata.

    Args:
        text: the header without its length.
        data_bytes: bytes after the header.
        source: the file's name, for errors.

    Raises:
        UserError: the header is malformed, or does not cover the data exactly.
    """
    document = parse_json(text, f"{source}: header")
    if not isinstance(document, dict):
        raise UserError(f"{source}: header: must be a JSON object, got {shown(document)}")
    metadata = document.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise UserError(f"{source}: header: {METADATA}: must be an object of strings, got {shown(metadata)}")
    slots = [_slot(name, document[name], f"{source}: tensor {shown(name)}") for name in document]
    slots.sort(key=lambda slot: (slot.start, slot.stop))
    reached = 0
    for slot in slots:
        if slot.start != reached:
            offsets = f"must begin at {reached}, got {slot.start}"
            raise UserError(f"{source}: tensor {shown(slot.name)}: data_offsets: {offsets}")
        reached = slot.stop
    if reached != data_bytes:
        raise UserError(
            f"{source}: its header declares {reached:,} bytes of tensors, and the file holds {data_bytes:,}"
        )
    return slots, metadata


def _slot(name: str, entry: Any, source: str) -> Slot:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise UserError(f"{source}: must have dtype, shape and data_offsets, got {shown(entry)}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise UserError(f"{source}: dtype: unknown {shown(dtype)}{suggest(str(dtype), ITEM_BYTES)}")
    if not are_counts(shape):
        raise UserError(f"{source}: shape: must be at most {MOST_AXES} integers >= 0, got {shown(shape)}")
    if not are_counts(offsets) or len(offsets) != 2:
        raise UserError(f"{source}: data_offsets: must be two integers >= 0, got {shown(offsets)}")
    if ITEM_BYTES[dtype] * math.prod(max(each, 1) for each in shape) >= 2**63:  # torch overflows
        raise UserError(f"{source}: shape: is too large for any machine: {shown(shape)}")
    start, stop = offsets
    if stop - start != ITEM_BYTES[dtype] * math.prod(shape):
        needed = f"{ITEM_BYTES[dtype] * math.prod(shape):,} bytes for {dtype} of shape {shown(shape)}"
        raise UserError(f"{source}: data_offsets: must be {needed}, got {shown(offsets)}")
    return Slot(name, dtype, tuple(shape), start, stop)


def are_counts(value: Any) -> bool:
    """True for at most `MOST_AXES` integers >= 0; the product of more could take hours."""
    is_short = isinstance(value, list | tuple) and len(value) <= MOST_AXES
    return is_short and all(type(each) is int and 0 <= each < 2**63 for each in value)
