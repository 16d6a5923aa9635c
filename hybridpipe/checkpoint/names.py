"""Names of the entries of a folder of checkpoints, and of the formats of an export. Pure.

ROOT/step-00000120/             a checkpoint: its files, and manifest.json, written last
ROOT/latest                     the name of the current checkpoint
ROOT/.lock                      locked by the training that writes there, and names it
ROOT/.step-00000120.tmp/        being written
ROOT/.step-00000120.replaced/   renamed for a new checkpoint of the same step, not yet in its place
ROOT/.step-00000120.deleted/    being deleted
ROOT/group-1/                   the checkpoints of another group, of several
"""

import re
from pathlib import Path
from typing import Literal, NamedTuple, get_args

CHECKPOINTS = "checkpoints"  # the folder in OUT
LATEST, LOCK = "latest", ".lock"
DCP_METADATA = ".metadata"  # of a folder of torch.distributed.checkpoint
_NAME = re.compile(r"(\.?)step-(\d{8,18})(?:\.(tmp|replaced|deleted))?")

State = Literal["tmp", "replaced", "deleted"]
Format = Literal["safetensors", "hf", "dcp"]
FORMATS: tuple[Format, ...] = get_args(Format)  # in which `export` writes a checkpoint's model


class Name(NamedTuple):
    """Parsed name of a directory; `state` is None for a checkpoint in its place."""

    step: int
    state: State | None


def of_group(path: Path, index: int) -> Path:
    """The place of a group's checkpoints, or checkpoint, behind that of the first group's."""
    if not index:
        return path
    name = f"group-{index}"
    return path / name if parse_name(path) is None else path.with_name(name) / path.name


def name_of(step: int, state: State | None = None) -> str:
    """The name of the checkpoint that was taken after `step` minibatches."""
    return f"step-{step:08d}" if state is None else f".step-{step:08d}.{state}"


def parse_name(path: Path) -> Name | None:
    """The name that `name_of` gave; None for any other."""
    found = _NAME.fullmatch(path.name)
    if found is None:
        return None
    name = Name(int(found[2]), found[3])  # type: ignore[arg-type]  # one of the three
    return name if name_of(*name) == path.name else None


def step_of(path: Path) -> int | None:
    """The step of a checkpoint in its place; None for any other name."""
    name = parse_name(path)
    return name.step if name is not None and name.state is None else None
