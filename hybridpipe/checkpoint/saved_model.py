"""SavedModel: the model in a checkpoint, whose tensors are read one by one.

Only the names of a checkpoint's tensors are known here: no model is built. Invariant: the tensors equal
`Trainer.full_state_dict` bit for bit, except the last bit of running statistics of more than two replicas.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridpipe.checkpoint import directory
from hybridpipe.checkpoint.manifest import MANIFEST, Manifest
from hybridpipe.checkpoint.names import CHECKPOINTS, step_of
from hybridpipe.checkpoint.shard import PlainFile
from hybridpipe.errors import UserError, shown
from hybridpipe.files import parse
from hybridpipe.model.held_part import HeldPart
from hybridpipe.planning.plan import Plan
from hybridpipe.stage.parts import Piece, join
from hybridpipe.stage.state import (
    AVERAGE,
    CENTRE,
    StageState,
    batches_agreed,
    read_optimizer,
    read_parts,
    samples_seen,
)
from hybridpipe.stage.statistics import Replica, agreed

_ALONE = [0, 1]  # the index of the only group, and the number of groups
_MODEL = "model."  # before the keys of the model's tensors


def find_checkpoint(source: Path) -> tuple[Path, list[str]]:
    """Return a checkpoint all of whose bytes were compared with its hashes, and lines for the user.

    Args:
        source: a checkpoint; or a folder of them, or the folder of a training, of which the last good one
            is taken.

    Raises:
        UserError: the checkpoint is damaged, or there is none.
    """
    if (source / MANIFEST).exists() or step_of(source) is not None or not source.is_dir():
        directory.verify(source)
        return source, []
    folder = source / CHECKPOINTS if (source / CHECKPOINTS).is_dir() else source
    checkpoint, lines = directory.last_good(folder)
    if checkpoint is None:
        raise UserError("; ".join([f"{source}: holds no complete checkpoint", *lines]))
    return checkpoint, lines


class _Part(NamedTuple):
    """A part of a tensor in a file, under a name there; `elements` and `held` as in a `Piece`."""

    file: PlainFile
    name: str
    elements: range | None
    held: HeldPart | None


class SavedModel:
    """Weights and buffers of a checkpoint, by their keys in `model.state_dict()`.

    Args:
        path: of a checkpoint whose hashes were compared (`find_checkpoint`).
        averages: parameters have the averages that `callbacks.EMA` keeps, where there is one. Without them,
            those of several groups have the weights that these have in common.

    The attribute `forms` has its tensors on the meta device, by key, in the order of `state_dict()`.

    Raises:
        UserError: files contradict each other, or there are no averages.
    """

    def __init__(self, path: Path, averages: bool = False) -> None:
        self.path, self._manifest = path, directory.read_manifest(path)
        self._files = {entry.name: PlainFile(path / entry.name) for entry in self._manifest.files}
        self._found: dict[str, PlainFile] = {}
        for name, file in self._files.items():
            if _rank_of(name) is None:
                self._add(name, file)
        self._parts = self._parts_by_key()
        if not self._found and not self._parts:
            raise UserError(f"{path}: must hold the tensors of a model, got none named model.…")
        ordered = [
            key for key in self._manifest.run.get("model") or () if key in self._found or key in self._parts
        ]  # the model's order
        keys = dict.fromkeys([*ordered, *self._found, *self._parts])
        self.forms = {key: self._form(key) for key in keys}
        self._statistics = self._agreed_statistics()
        self._averages = self._beside_by_key(AVERAGE) if averages and keeps_averages(self._manifest) else {}
        if averages and not self._averages:
            what = "has no averages of weights: hybridpipe.callbacks.EMA keeps them from the first update on"
            raise UserError(f"{path}: {what}")
        has_centre = self._manifest.run.get("group", _ALONE) != _ALONE
        self._instead = self._averages or (self._beside_by_key(CENTRE) if has_centre else {})

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(form.nbytes for form in self.forms.values())

    @property
    def tied(self) -> dict[str, str]:
        """The first name of each tensor that has several, by its other names; UserError if it is not said."""
        match self._manifest.run.get("tied"):
            case dict() as found if all(name in self.forms for pair in found.items() for name in pair):
                return found
            case None:
                what = "is missing, as an older version wrote the checkpoint: resume from it and save again"
                raise UserError(f"{self.path / MANIFEST}: run.tied: {what}")
            case found:
                where = f"{self.path / MANIFEST}: run.tied"
                raise UserError(f"{where}: must be names of the model's tensors, got {shown(found)}")

    def read(self, key: str) -> Tensor:
        """Return a tensor, on the CPU."""
        if key in self._instead:
            return self._joined(key, self._instead[key], f"average of {key}")
        if key in self._parts:
            return self._joined(key, self._parts[key], key)
        if key in self._statistics:
            return self._statistics[key]
        return self._found[key].read(_MODEL + key)

    @property
    def num_averages(self) -> int:
        """Number of tensors that are averages."""
        return len(self._averages)

    def _add(self, name: str, file: PlainFile) -> None:
        for key in _keys(file):
            before = self._found.setdefault(key, file)
            if before is not file and not _same(before.read(_MODEL + key), file.read(_MODEL + key)):
                where = f"{self.path / name}: tensor {shown(key)}"
                raise UserError(f"{where}: must equal the same tensor of another stage")

    def _agreed_statistics(self) -> dict[str, Tensor]:
        """Return the running statistics, averaged over the replicas of their stages."""
        manifest, where = self._manifest, self.path / MANIFEST
        plan = parse(Plan, manifest.plan, f"{where}: plan")
        names = manifest.run.get("statistics")  # each replica has seen its own samples
        if not isinstance(names, list):
            raise UserError(f"{where}: run.statistics: must be a list, got {shown(names)}")
        batches: dict[str, int] = {}
        for name, file in self._files.items():
            if _rank_of(name) is None:
                batches |= batches_agreed(file.value, str(self.path / name))
        found = {key: self._found[key].read(_MODEL + key) for key in names if key in self._found}
        of_ranks = {rank: name for name in self._files if (rank := _rank_of(name)) is not None}
        for ranks, together in {stage.leaders: stage.sync_batchnorm for stage in plan.stages}.items():
            replicas = [self._replica(of_ranks[rank]) for rank in ranks if rank in of_ranks]
            if len(replicas) > 1:
                first = replicas[0]._replace(tensors=found)
                found |= agreed(names, [first, *replicas[1:]], batches, together)
        return found

    def _replica(self, name: str) -> Replica:
        file = self._files[name]
        tensors = {key: file.read(_MODEL + key) for key in _keys(file)}
        return Replica(tensors, samples_seen(file.value, str(self.path / name)))

    def _form(self, key: str) -> Tensor:
        if key in self._found:
            return self._found[key].forms[_MODEL + key]
        file, name, *_ = self._parts[key][0]
        shape = read_parts(file.value, str(self.path))[key].whole
        return torch.empty(shape, dtype=file.forms[name].dtype, device="meta")

    def _parts_by_key(self) -> dict[str, list[_Part]]:
        """Return the parts of each tensor that no file has whole."""
        found = defaultdict[str, list[_Part]](list)
        for name, file in self._files.items():
            for key, part in read_parts(file.value, str(self.path / name)).items():
                if f"part.{key}" in file.forms:
                    found[key].append(_Part(file, f"part.{key}", None, part))
        return dict(found)

    def _beside_by_key(self, kind: str) -> dict[str, list[_Part]]:
        """Return the parts of what is kept of each parameter under a name, beside the optimizer's state."""
        found = defaultdict[str, list[_Part]](list)
        for name, file in self._files.items():
            value = file.value
            if not isinstance(value, dict):
                continue
            for key, own in read_optimizer(StageState(file.forms, value), str(self.path / name)).items():
                if kind in own.state:
                    found[key].append(_Part(file, f"optimizer.{key}.{kind}", own.part, own.held))
        # The optimizer knows a tensor by one of its names.
        for name, first in self.tied.items() if found else ():
            for one, other in ((name, first), (first, name)):
                if one in found:
                    found[other] = found[one]
        return dict(found)

    def _joined(self, key: str, parts: list[_Part], what: str) -> Tensor:
        form = self.forms[key]
        try:
            pieces = [Piece(part.file.read(part.name), part.elements, part.held) for part in parts]
            whole: Tensor = join(pieces, form.shape)
        except (LookupError, RuntimeError) as error:
            raise UserError(f"{self.path}: {what}: cannot be joined: {error}") from None
        return whole.to(form.dtype)


def _keys(file: PlainFile) -> Iterator[str]:
    return (name.removeprefix(_MODEL) for name in file.forms if name.startswith(_MODEL))


def _rank_of(name: str) -> int | None:
    """Return the rank whose own state a file has; None for a stage's file."""
    rank = name.removeprefix("rank-").removesuffix(".safetensors")
    return int(rank) if rank.isdecimal() else None


def keeps_averages(manifest: Manifest) -> bool:
    """True if a callback of the training has kept the averages; else they are of an earlier one."""
    states: Mapping[str, Any] = manifest.run.get("callbacks") or {}
    return any(isinstance(state, dict) and state.get("averages") is True for state in states.values())


def _same(one: Tensor, other: Tensor) -> bool:
    """True if both are equal bit for bit."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
