"""Plain: the model in a checkpoint as a file of its `state_dict()` alone, which anybody can load.

    safetensors.torch.load_file("model.safetensors")       # model.load_state_dict(...)

Knows which names a checkpoint's tensors have, and nothing else about training: no model is built.
Invariant: what is exported equals, bit for bit, what `Trainer.full_state_dict` gives where the checkpoint was
taken; where a stage had more than two replicas, running statistics may differ in the last bit, as a sum does.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from hybridpipe.checkpoint import directory
from hybridpipe.checkpoint.disk import replacing
from hybridpipe.checkpoint.manifest import MANIFEST
from hybridpipe.checkpoint.names import step_of
from hybridpipe.checkpoint.shard import read_plain, read_shard, write_plain
from hybridpipe.errors import UserError, shown
from hybridpipe.files import parse
from hybridpipe.planning.plan import Plan
from hybridpipe.stage.state import batches_agreed, samples_seen, under
from hybridpipe.stage.statistics import Replica, agreed


def export(source: Path, out: Path) -> list[str]:
    """Write the weights in a checkpoint, or in the last good one of a folder, to a safetensors file.

    Returns:
        What there is to tell, in lines.

    Raises:
        UserError: there is no checkpoint, or a file of it is damaged, or `out` cannot be written; a file that
            was there before is still there.
    """
    checkpoint, lines = _found(source)
    state = model_state(checkpoint)
    with replacing(out) as unfinished:
        write_plain(unfinished, state)
    num_bytes = sum(tensor.nbytes for tensor in state.values())
    return [*lines, f"{len(state)} tensors, {num_bytes / 1e6:,.1f} MB, of {checkpoint} written to {out}"]


def model_state(checkpoint: Path) -> dict[str, Tensor]:
    """What `model.state_dict()` was; reads and verifies the files that it needs.

    Raises:
        UserError: one of them is damaged, or they contradict each other.
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
                raise UserError(
                    f"{path}: tensor {shown(key)}: must be as in another stage, which holds it, too"
                )
            else:
                state[key] = tensor
    if not state:
        raise UserError(f"{checkpoint}: must hold the tensors of a model, got none named model.…")
    for ranks in dict.fromkeys(stage.ranks for stage in plan.stages):
        replicas = [of_ranks[rank] for rank in ranks if rank in of_ranks]
        if len(replicas) > 1:
            state |= agreed(statistics, [replicas[0]._replace(tensors=state), *replicas[1:]], batches)
    return state


def read_weights(source: Path, model: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of any safetensors file; one that `model` has under several keys, under all of them.

    `safetensors.torch.save_model` writes a tied weight under one of its keys only.

    Raises:
        UserError: the file is none. Whether its tensors are the model's is not looked at.
    """
    tensors = read_plain(source)
    written = {_memory(model[key]): tensor for key, tensor in tensors.items() if key in model}
    for key, tensor in model.items():
        if key not in tensors and tensor.numel() and _memory(tensor) in written:
            tensors[key] = written[_memory(tensor)]
    return tensors


def _memory(tensor: Tensor) -> tuple[object, ...]:
    """Which elements of which memory a tensor is."""
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _found(source: Path) -> tuple[Path, list[str]]:
    if (source / MANIFEST).exists() or step_of(source) is not None or not source.is_dir():
        return source, []
    checkpoint, lines = directory.last_good(source)
    if checkpoint is None:
        raise UserError("; ".join([f"{source}: holds no checkpoint that is whole", *lines]))
    return checkpoint, lines


def _same(one: Tensor, other: Tensor) -> bool:
    """Bit for bit."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
