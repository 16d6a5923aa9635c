"""Exchange: a checkpoint's model, written in the formats that other programs read.

Not known here: configs and classes of models. Invariant: the output is whole or not there, an earlier one
stays until then, and no more than one tensor is in memory.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import count
from pathlib import Path

from torch import Tensor

from hybridpipe.checkpoint.disk import new_folder, replacing
from hybridpipe.checkpoint.names import Format
from hybridpipe.checkpoint.plain import INDEX, WHOLE
from hybridpipe.checkpoint.saved_model import SavedModel
from hybridpipe.checkpoint.shard import write_plain
from hybridpipe.files import write_json

SHARD_BYTES = 5 * 10**9  # huggingface_hub's own limit of a file


def write(
    saved: SavedModel, out: Path, form: Format, describe: Callable[[Path], object] | None = None
) -> None:
    """Write a model to a file (safetensors), which it replaces, or to a new or an empty folder.

    Args:
        describe: adds other files to the folder, such as config.json.

    Raises:
        UserError: it cannot be written, or a file of the checkpoint was damaged meanwhile.
    """
    if form == "safetensors":
        with replacing(out) as unfinished:
            write_plain(unfinished, saved.forms, saved.read)
        return
    with new_folder(out) as folder:
        if form == "hf":
            _write_shards(folder, saved)
        else:
            from hybridpipe.checkpoint.dcp import write_dcp

            write_dcp(folder, saved.forms, saved.read)
        if describe is not None:
            describe(folder)


def _write_shards(folder: Path, saved: SavedModel) -> None:
    """Write files of at most SHARD_BYTES and their index, or one file, as `save_pretrained` does.

    A tied tensor is there once, under its first name.
    """
    shards = list(_shards({key: form for key, form in saved.forms.items() if key not in saved.tied}))
    if len(shards) == 1:
        write_plain(folder / WHOLE, shards[0], saved.read)
        return
    stem, suffix = Path(WHOLE).stem, Path(WHOLE).suffix
    files = {f"{stem}-{i:05d}-of-{len(shards):05d}{suffix}": shard for i, shard in zip(count(1), shards)}
    for name, shard in files.items():
        write_plain(folder / name, shard, saved.read)
    total = sum(form.nbytes for shard in shards for form in shard.values())
    names = {key: name for name, shard in files.items() for key in shard}
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": names})


def _shards(forms: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors file by file; one that is larger than a file may be has a file of its own."""
    shard: dict[str, Tensor] = {}
    size = 0
    for key, form in forms.items():
        if shard and size + form.nbytes > SHARD_BYTES:
            yield shard
            shard, size = {}, 0
        shard[key] = form
        size += form.nbytes
    yield shard
