"""Small checkpoints whose content can be told from each other."""

from pathlib import Path
from typing import Any

import torch

from hybridpipe.checkpoint import directory
from hybridpipe.checkpoint.manifest import FileEntry
from hybridpipe.checkpoint.shard import read_shard, write_shard

DESCRIBED: dict[str, Any] = {
    "epoch": 1,
    "position": 20,
    "plan": {"stages": [{"start": 0, "stop": 2, "replicas": 2}]},
    "versions": {"hybridpipe": "0.1.0", "torch": "2.13.0"},
    "run": {"seed": 7, "learning_rate": 0.1, "losses": [0.5, 0.25]},
}
FILES = ("rank-0000.safetensors", "rank-0001.safetensors", "stage-000.safetensors")


def write_files(path: Path, value: float) -> list[FileEntry]:
    """Every file says `value`."""
    tensors = {"model.weight": torch.full((4, 3), value), "optimizer.step": torch.tensor(int(value))}
    return [write_shard(path / name, tensors, {"value": value}) for name in FILES]


def save(root: Path, step: int, keep: int = 2, value: float | None = None) -> Path:
    files = write_files(directory.begin(root, step), float(step) if value is None else value)
    return directory.publish(root, step, files, DESCRIBED, keep)


def value_of(path: Path) -> float:
    """What all files of a checkpoint say, which has to be the same."""
    manifest = directory.verify(path)
    said = set()
    for entry in manifest.files:
        tensors, meta = read_shard(path / entry.name, entry)
        said |= {meta["value"], *tensors["model.weight"].flatten().tolist()}
    (value,) = said
    return value


def tree(root: Path) -> dict[str, bytes]:
    """Every file, to see that nothing was changed."""
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())
