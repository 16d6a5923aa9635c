"""Export: the command that writes a checkpoint's model in a format of other programs.

Not known here: how files are written. Invariant: config.json is that of a model which was built and whose
tensors are the checkpoint's in name, type and shape; it is never guessed.
"""

import argparse
from collections.abc import Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from hybridpipe.checkpoint.exchange import write
from hybridpipe.checkpoint.saved_model import SavedModel, find_checkpoint
from hybridpipe.cli.data import in_one_line
from hybridpipe.cli.profile import build_model
from hybridpipe.config.file import load_config
from hybridpipe.errors import UserError, shown
from hybridpipe.files import writing
from hybridpipe.model.deferred_init.deferred import build
from hybridpipe.stage.state import check_fits, described


def export(options: argparse.Namespace) -> list[str]:
    """Write the model in `options.checkpoint` to `options.out`; return lines for the user.

    Raises:
        UserError: there is no checkpoint, it is damaged, or `out` cannot be written; an earlier `out` stays.
    """
    if options.config is not None and options.format != "hf":
        raise UserError(f"export: --config goes with --format hf, got --format {options.format}")
    if options.set and (options.config is None or options.config.suffix != ".toml"):
        raise UserError(f"export: --set goes with --config CONFIG.toml, got --config {options.config}")
    checkpoint, lines = find_checkpoint(options.checkpoint)
    saved = SavedModel(checkpoint, options.averages)
    model = None if options.config is None else _model(options.config, options.set)
    if model is not None:
        check_fits(described(saved.forms), model.state_dict(), str(checkpoint))
    write(saved, options.out, options.format, None if model is None else partial(_describe, model))
    what = f"{len(saved.forms)} tensors, {saved.num_bytes / 1e6:,.1f} MB, of {checkpoint}"
    if options.averages:
        what = f"{what}, {saved.num_averages} of them averages,"
    lines.append(f"{what} written to {options.out}")
    if options.format == "hf" and model is None:
        lines.append("without config.json, which from_pretrained needs: --config says where it comes from")
    return lines


def _model(source: Path, overrides: Sequence[str]) -> nn.Module:
    """Return the transformers model that a TOML file or a config.json describes, without its numbers.

    Args:
        overrides: of the TOML file's fields, as `a.b=value`.

    Raises:
        UserError: it describes none.
    """
    if source.suffix != ".toml":
        return _model_of_json(source)
    with in_one_line(TypeError, ValueError):
        model = build(partial(build_model, load_config(source, overrides))).model
    if not _is_of_transformers(model):
        what = f"its model must be one of transformers, got {type(model).__name__}"
        raise UserError(f"{source}: --config: {what}; without --config no config.json is written")
    return model


def _is_of_transformers(model: nn.Module) -> bool:
    """True if the model can be saved and loaded by transformers, which is not imported for the answer."""
    bases = [(base.__module__.partition(".")[0], base.__name__) for base in type(model).__mro__]
    return ("transformers", "PreTrainedModel") in bases


def _model_of_json(source: Path) -> nn.Module:
    """Return the model of a config.json, or of a folder that has one."""
    folder = source if source.is_dir() else source.parent
    path = folder / "config.json"
    if source not in (folder, path) or not path.is_file():
        what = "must be a TOML file, a config.json, or a folder with one"
        raise UserError(f"{source}: --config: {what}")
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        names = config.architectures
        kind = getattr(transformers, names[0], None) if names else None
        if isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel):
            return build(partial(kind, config)).model
    except Exception as error:  # transformers and its models check a config in many ways
        what = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise UserError(f"{path}: transformers cannot read it: {what}") from None
    what = f"must be the name of a model's class of transformers, got {shown(names)}"
    remedy = "save_pretrained of the model writes it, that of its config does not"
    raise UserError(f"{path}: architectures: {what}; {remedy}")


def _describe(model: Any, folder: Path) -> None:
    """Write what `save_pretrained` writes beside the weights."""
    config = deepcopy(model.config)
    config.architectures, config.dtype = [type(model).__name__], str(model.dtype).removeprefix("torch.")
    with writing(folder), in_one_line(ValueError):  # settings that transformers does not write
        config.save_pretrained(folder)
        if model.can_generate():
            model.generation_config.save_pretrained(folder)
