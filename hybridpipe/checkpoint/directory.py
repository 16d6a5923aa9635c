"""Checkpoints as directories: publication by renaming, search for the last good one, deletion of old ones.

Torch and MPI are not known here; one process calls these functions for all ranks. Invariant: after a kill or
a power cut at any moment, `last_good` finds a complete checkpoint, the old or the new one.
"""

import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hybridpipe.checkpoint.disk import (
    NewFile,
    compare,
    hash_of,
    read_bounded,
    reading,
    replacing,
    sync_directory,
)
from hybridpipe.checkpoint.manifest import JSON, MANIFEST, FileEntry, Manifest, from_text, to_text
from hybridpipe.checkpoint.names import LATEST, name_of, parse_name, step_of
from hybridpipe.errors import UserError, shown
from hybridpipe.files import writing
from hybridpipe.health import faults
from hybridpipe.notices import notices

_LARGEST_MANIFEST = 1 << 26  # bytes; the files of 100,000 ranks need a quarter of it
_LARGEST_LATEST = 100


def checkpoints(root: Path) -> list[Path]:
    """Paths in `root` with a checkpoint's name, the largest step first."""
    found = [each for each in _listed(root) if step_of(each) is not None]
    return sorted(found, key=_step, reverse=True)


def make_folder(root: Path) -> None:
    """Make a folder with its parents, which a power cut does not lose.

    Raises:
        UserError: it cannot be made, or is no folder.
    """
    with writing(root):
        if root.exists() and not root.is_dir():
            raise UserError(f"{root}: must be a directory")
        new = [each for each in (root, *root.parents) if not each.exists()]
        root.mkdir(parents=True, exist_ok=True)
    for each in new:
        sync_directory(each.parent)


def begin(root: Path, step: int) -> Path:
    """Make a new, empty directory for the files of a checkpoint; leftovers of a killed training are removed.

    Raises:
        UserError: the directory cannot be made.
    """
    make_folder(root)
    for line in _clear(root):
        notices.tell(line)
    path = _temporary(root, step)
    with writing(path):
        path.mkdir()
    return path


def abandon(root: Path, step: int) -> None:
    """Remove the temporary directory of an unfinished checkpoint, as far as possible."""
    shutil.rmtree(_temporary(root, step), ignore_errors=True)


def publish(root: Path, step: int, files: Sequence[FileEntry], described: dict[str, JSON], keep: int) -> Path:
    """Publish the files written since `begin` as a checkpoint, and delete old checkpoints.

    Args:
        files: the results of `write_shard` on all ranks; all of these files must exist.
        described: `epoch`, `position`, `plan`, `versions` and `run` of the `Manifest`.
        keep: number of checkpoints that stay, with this one. Checkpoints of larger steps always stay.

    Raises:
        UserError: the checkpoint and its temporary directory do not exist then. If only the last rename, of
            `latest`, has failed, the checkpoint exists and is not the latest.
    """
    if keep < 1:
        raise ValueError(f"keep must be >= 1, got {keep}")
    unfinished, final = _temporary(root, step), root / name_of(step)
    try:
        text = to_text(Manifest(step=step, files=tuple(sorted(files, key=lambda f: f.name)), **described))
        _check_files(unfinished, files, "do all ranks write to one file system?")
        with NewFile(unfinished / MANIFEST) as manifest:
            faults.at("save-manifest", step=step)
            manifest.write(text.encode())
        sync_directory(unfinished)
        with _replacing_latest(final):  # written first: if the disk is full, nothing has been renamed yet
            faults.at("save-rename", step=step)
            _move_into_place(unfinished, final)  # readers see the checkpoint from here on
            faults.at("save-latest", step=step)
    except BaseException:
        abandon(root, step)
        raise
    faults.at("save-prune", step=step)
    for line in _prune(root, step, keep):
        notices.tell(line)
    return final


def stand_on(checkpoint: Path) -> None:
    """Let `latest` name this checkpoint, to which the training has gone back."""
    with _replacing_latest(checkpoint):
        pass


def read_manifest(path: Path) -> Manifest:
    """Manifest of the checkpoint `path`, whose other files are not read.

    Raises:
        UserError: the manifest is missing, damaged, or of another step than the directory's name.
    """
    with reading(path):
        if not path.is_dir():
            raise UserError(f"{path}: must be a checkpoint's directory")
    source = path / MANIFEST
    manifest = from_text(read_bounded(source, _LARGEST_MANIFEST), str(source))
    if step_of(path) not in (None, manifest.step):
        raise UserError(
            f"{source}: step: must be {step_of(path)} as in the directory's name, got {manifest.step}"
        )
    return manifest


def verify(path: Path) -> Manifest:
    """Read every byte of a checkpoint and compare it with the manifest.

    Raises:
        UserError: a file is missing, damaged or not listed; the error names it.
    """
    manifest = read_manifest(path)
    _check_files(path, manifest.files)
    for entry in manifest.files:
        compare(path / entry.name, hash_of(path / entry.name), entry)
    return manifest


def is_good(path: Path) -> bool:
    """Return True if all bytes of a checkpoint equal their hashes."""
    try:
        verify(path)
    except UserError:
        return False
    return True


def last_good(root: Path) -> tuple[Path | None, list[str]]:
    """Checkpoint to resume from: the latest if it verifies, else the next that does; None if none does.

    Returns:
        The checkpoint, and a line for each one that was passed over.
    """
    passed = []
    candidates, lines = _candidates(root)
    for path in candidates:
        try:
            verify(path)
        except UserError as error:
            passed.append(f"passed over {path.name}: {error}")
        else:
            return path, lines + passed
    return None, lines + passed


@contextmanager
def _replacing_latest(checkpoint: Path) -> Iterator[None]:
    """Write `latest` for this checkpoint, and put it in place when the context ends normally."""
    with replacing(checkpoint.parent / LATEST) as unfinished:
        with NewFile(unfinished) as file:
            file.write(f"{checkpoint.name}\n".encode())
        yield


def _candidates(root: Path) -> tuple[list[Path], list[str]]:
    """Return the checkpoints in the order to try: `latest`, older ones, newer ones; and lines for the user.

    Newer ones exist if the training has gone back to an earlier checkpoint.
    """
    found = checkpoints(root)
    # Killed between two renames: complete, and the only one of its step.
    for each in _in_state(root, "replaced"):
        if not _in_place(each).exists():
            found.append(each)
    with reading(root / LATEST):
        latest, lines = _latest(root) if found else (None, [])
    reached = sys.maxsize if latest is None else _step(latest)
    return sorted(found, key=lambda each: (_step(each) > reached, -_step(each))), lines


def _latest(root: Path) -> tuple[Path | None, list[str]]:
    """Return the checkpoint that `latest` names, if the file exists, and a line for each mistake in it."""
    path = root / LATEST
    if not path.exists():
        return None, []
    try:
        name = read_bounded(path, _LARGEST_LATEST).decode("utf-8", "replace").strip()
    except UserError as error:
        return None, [str(error)]
    if step_of(Path(name)) is None or Path(name).name != name:
        return None, [f"{path}: must name a checkpoint, got {shown(name)}"]
    if not (root / name).is_dir():
        return root / name, [f"{path}: names {name}, which does not exist"]
    return root / name, []


def _step(path: Path) -> int:
    """Return the step of a checkpoint in any state."""
    name = parse_name(path)
    assert name is not None, path
    return name.step


def _in_place(path: Path) -> Path:
    """Return the path of this checkpoint once it is complete."""
    return path.with_name(name_of(_step(path)))


def _in_state(root: Path, *states: str) -> list[Path]:
    return [each for each in _listed(root) if (name := parse_name(each)) and name.state in states]


def _check_files(path: Path, files: Sequence[FileEntry], hint: str = "") -> None:
    """Raise UserError unless the directory has exactly these files, of these lengths, and the manifest."""
    present = {each.name for each in _listed(path)} - {MANIFEST}
    for entry in files:
        if entry.name not in present:
            raise UserError(f"{path / entry.name}: is missing{hint and f'; {hint}'}")
        with reading(path / entry.name):
            size = (path / entry.name).stat().st_size
        if size != entry.num_bytes:
            raise UserError(f"{path / entry.name}: must have {entry.num_bytes:,} bytes, got {size:,}")
    if unknown := sorted(present - {entry.name for entry in files}):
        raise UserError(f"{path / unknown[0]}: is not listed in {MANIFEST}")


def _move_into_place(unfinished: Path, final: Path) -> None:
    replaced = final.with_name(name_of(_step(final), "replaced"))
    with writing(final):
        if final.exists():
            os.rename(final, replaced)
        os.rename(unfinished, final)
    sync_directory(final.parent)


def _prune(root: Path, step: int, keep: int) -> list[str]:
    """Delete checkpoints older than the last `keep` complete ones; return lines about failures.

    Incomplete ones are not counted, and are deleted if they are older than all that are kept.
    """
    kept, old = 1, _in_state(root, "replaced", "deleted")
    for path in checkpoints(root):
        if _step(path) >= step:
            continue
        if kept < keep:
            kept += _looks_complete(path)
        else:
            old.append(path)
    return _delete(old)


def _looks_complete(path: Path) -> bool:
    try:
        _check_files(path, read_manifest(path).files)
    except UserError:
        return False
    return True


def _delete(paths: Sequence[Path]) -> list[str]:
    """Delete directories; return lines about failures. Renaming first keeps a rest from looking complete."""
    lines = []
    for path in paths:
        doomed = path.with_name(name_of(_step(path), "deleted"))
        try:
            if doomed != path:
                _remove(doomed)
                os.rename(path, doomed)
            _remove(doomed)
        except OSError as error:  # is tried again later, and must not end a training
            lines.append(f"{path}: cannot be deleted: {error.strerror or error}")
    return lines


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _clear(root: Path) -> list[str]:
    """Remove leftovers of a killed training; a checkpoint that it only renamed returns to its place."""
    for path in _in_state(root, "replaced"):
        if not _in_place(path).exists():
            with writing(path):
                os.rename(path, _in_place(path))
    return _delete(_in_state(root, "tmp", "replaced", "deleted"))


def _temporary(root: Path, step: int) -> Path:
    return root / name_of(step, "tmp")


def _listed(path: Path) -> list[Path]:
    """Return the entries of a directory; none if it does not exist."""
    with reading(path):
        return sorted(path.iterdir()) if path.exists() else []
