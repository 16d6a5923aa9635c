"""Plain files of weights: a model's `state_dict()` alone, as `safetensors.torch.load_file` reads it.

Only the names of a checkpoint's tensors are known here: no model is built. Invariant: an export equals
`Trainer.full_state_dict` bit for bit, except the last bit of running statistics of more than two replicas.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from hybridpipe.checkpoint import directory
from hybridpipe.checkpoint.disk import replacing
from hybridpipe.checkpoint.manifest import MANIFEST
from hybridpipe.checkpoint.names import step_of
from hybridpipe.checkpoint.shard import PlainFile, read_shard, write_plain
from hybridpipe.errors import UserError, shown
from hybridpipe.files import parse, read_object
from hybridpipe.planning.plan import Plan
from hybridpipe.stage.state import batches_agreed, check_fits, described, samples_seen, under
from hybridpipe.stage.statistics import Replica, agreed

_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"  # files of save_pretrained


def export(source: Path, out: Path) -> list[str]:
    """Write the weights of a checkpoint, or of the last good one in a folder, to a safetensors file.

    Returns:
        Lines for the user.

    Raises:
        UserError: there is no checkpoint, a file of it is damaged, or `out` cannot be written; an earlier
            `out` then stays.
    """
    checkpoint, lines = _found(source)
    state = model_state(checkpoint)
    with replacing(out) as unfinished:
        write_plain(unfinished, state)
    num_bytes = sum(tensor.nbytes for tensor in state.values())
    return [*lines, f"{len(state)} tensors, {num_bytes / 1e6:,.1f} MB, of {checkpoint} written to {out}"]


def model_state(checkpoint: Path) -> dict[str, Tensor]:
    """Weights and buffers of a checkpoint, as `model.state_dict()` named them.

    Raises:
        UserError: a file is damaged, or files contradict each other.
    """
    state: dict[str, Tensor] = {}
    of_ranks: dict[int, Replica] = {}
    batches: dict[str, int] = {}
    manifest = directory.read_manifest(checkpoint)
    plan = parse(Plan, manifest.plan, f"{checkpoint / MANIFEST}: plan")
    statistics = manifest.run.get("statistics")  # each replica has seen its own samples
    if not isinstance(statistics, list):
        raise UserError(f"{checkpoint / MANIFEST}: run.statistics: must be a list, got {shown(statistics)}")
    for entry in manifest.files:
        path = checkpoint / entry.name
        tensors, meta = read_shard(path, entry)
        own = under("model", tensors)
        rank = entry.name.removeprefix("rank-").removesuffix(".safetensors")
        if rank.isdecimal():
            of_ranks[int(rank)] = Replica(own, samples_seen(meta, str(path)))
            continue
        batches |= batches_agreed(meta, str(path))
        for key, tensor in own.items():
            if key in state and not _same(state[key], tensor):
                raise UserError(f"{path}: tensor {shown(key)}: must equal the same tensor of another stage")
            else:
                state[key] = tensor
    if not state:
        raise UserError(f"{checkpoint}: must hold the tensors of a model, got none named model.…")
    for ranks in dict.fromkeys(stage.ranks for stage in plan.stages):
        replicas = [of_ranks[rank] for rank in ranks if rank in of_ranks]
        if len(replicas) > 1:
            state |= agreed(statistics, [replicas[0]._replace(tensors=state), *replicas[1:]], batches)
    return state


class Weights:
    """A model's weights in files, which are read one by one.

    A tied weight is known under all of its keys: `safetensors.torch.save_model` writes it under one only.

    Args:
        source: a safetensors file, or a folder as Hugging Face's `save_pretrained` writes it.
        model: its `state_dict()`.

    Raises:
        UserError: a file is no safetensors file, or a tensor's type, shape or name is not the model's.
    """

    def __init__(self, source: Path, model: Mapping[str, Tensor]) -> None:
        files = map(PlainFile, _files_of(source))
        self._tensors = {name: (file, name) for file in files for name in file.forms}
        written = {_memory(model[key]): entry for key, entry in self._tensors.items() if key in model}
        for key, tensor in model.items():
            if key not in self._tensors and tensor.numel() and _memory(tensor) in written:
                self._tensors[key] = written[_memory(tensor)]
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
    """True if the path is that of a file of weights, or of a folder with some as Hugging Face writes it."""
    return source.suffix == ".safetensors" or any((source / name).exists() for name in (_WHOLE, _INDEX))


def _files_of(source: Path) -> list[Path]:
    if not source.is_dir():
        return [source]
    if (source / _WHOLE).exists():
        return [source / _WHOLE]
    index = source / _INDEX
    names = read_object(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise UserError(f"{index}: weight_map: must map names of tensors to files, got {shown(names)}")
    return [source / Path(name).name for name in dict.fromkeys(names.values())]


def _memory(tensor: Tensor) -> tuple[object, ...]:
    """Return a key that is equal for tensors that are the same view of the same memory."""
    storage = tensor.untyped_storage()._cdata  # an address would not tell tensors on the meta device apart
    return storage, tensor.storage_offset(), tensor.dtype, tensor.shape, tensor.stride()


def _found(source: Path) -> tuple[Path, list[str]]:
    if (source / MANIFEST).exists() or step_of(source) is not None or not source.is_dir():
        return source, []
    checkpoint, lines = directory.last_good(source)
    if checkpoint is None:
        raise UserError("; ".join([f"{source}: holds no complete checkpoint", *lines]))
    return checkpoint, lines


def _same(one: Tensor, other: Tensor) -> bool:
    """True if both are equal bit for bit."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
