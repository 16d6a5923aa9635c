"""Directory: a checkpoint as a directory, which is complete under its final name or not there.

Knows neither torch nor MPI: one process calls it, for all; `names` tells what lies there. Invariant: after a
kill or a power cut at any moment, what `last_good` finds is whole: the old checkpoint or the new one.
"""

import fcntl
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
    writing,
)
from hybridpipe.checkpoint.manifest import JSON, MANIFEST, FileEntry, Manifest, from_text, to_text
from hybridpipe.checkpoint.names import LATEST, LOCK, name_of, parse_name, step_of
from hybridpipe.errors import UserError, shown
from hybridpipe.health import faults

_LARGEST_MANIFEST = 1 << 26  # bytes: 100,000 ranks' files need a quarter
_LARGEST_LATEST = 100


def checkpoints(root: Path) -> list[Path]:
    """What has a checkpoint's name in `root`, the largest step first."""
    found = [each for each in _listed(root) if step_of(each) is not None]
    return sorted(found, key=_step, reverse=True)


def hold(root: Path) -> int:
    """Keep other trainings out of `root` until the descriptor returned is closed, or the process has ended.

    Raises:
        UserError: another one is there, or `root` cannot be made.
    """
    _make(root)
    with writing(root / LOCK):
        descriptor = os.open(root / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise UserError(f"{root}: another training that is running saves there") from None
        except OSError:  # a file system without locks
            pass
    return descriptor


def begin(root: Path, step: int) -> Path:
    """The new, empty directory to write the files of a checkpoint into; what a killed training left goes.

    Raises:
        UserError: it cannot be made.
    """
    _make(root)
    for line in _clear(root):
        _tell(line)
    path = _temporary(root, step)
    with writing(path):
        path.mkdir()
    return path


def abandon(root: Path, step: int) -> None:
    """Give up a checkpoint that was begun: its temporary directory goes, as far as that is possible."""
    shutil.rmtree(_temporary(root, step), ignore_errors=True)


def publish(root: Path, step: int, files: Sequence[FileEntry], described: dict[str, JSON], keep: int) -> Path:
    """Let the files written since `begin` appear as a checkpoint, and delete checkpoints that are too old.

    Args:
        files: what each `write_shard` returned, on whatever rank; they must all be there.
        described: `epoch`, `position`, `plan`, `versions` and `run` of the `Manifest`.
        keep: so many checkpoints stay, this one included; those of larger steps are not counted, and stay.

    Raises:
        UserError: the checkpoint is not there then, and neither is its temporary directory. Only where
            nothing but the last rename failed, of `latest`, it is there and not the latest.
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
        with _latest_to_be(final):  # written before: where the disk is full, nothing has moved yet
            faults.at("save-rename", step=step)
            _move_into_place(unfinished, final)
            faults.at("save-latest", step=step)
    except BaseException:
        abandon(root, step)
        raise
    faults.at("save-prune", step=step)
    for line in _prune(root, step, keep):
        _tell(line)
    return final


def stand_on(checkpoint: Path) -> None:
    """Let `latest` name this checkpoint: the one just published, or the one that is gone back to."""
    with _latest_to_be(checkpoint):
        pass


def read_manifest(path: Path) -> Manifest:
    """The manifest of the checkpoint `path`, whose files are not looked at.

    Raises:
        UserError: there is none, or it is damaged, or of another step than the directory's name says.
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
        UserError: one line that names the file that is wrong, and how.
    """
    manifest = read_manifest(path)
    _check_files(path, manifest.files)
    for entry in manifest.files:
        compare(path / entry.name, hash_of(path / entry.name), entry)
    return manifest


def last_good(root: Path) -> tuple[Path | None, list[str]]:
    """The checkpoint to resume from: the latest, or else the next one that verifies; None if there is none.

    Returns:
        It, and one line for each that was passed over.
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


def _make(root: Path) -> None:
    with writing(root):
        if root.exists() and not root.is_dir():
            raise UserError(f"{root}: must be a directory")
        new = [each for each in (root, *root.parents) if not each.exists()]
        root.mkdir(parents=True, exist_ok=True)
    for each in new:
        sync_directory(each.parent)


@contextmanager
def _latest_to_be(checkpoint: Path) -> Iterator[None]:
    """`latest`, with what it is going to say, takes its place when the context ends well."""
    with replacing(checkpoint.parent / LATEST) as unfinished:
        with NewFile(unfinished) as file:
            file.write(f"{checkpoint.name}\n".encode())
        yield


def _candidates(root: Path) -> tuple[list[Path], list[str]]:
    """In the order to be tried: `latest`, older ones, newer ones, which the training has gone back behind."""
    found = checkpoints(root)
    for each in _in_state(root, "replaced"):  # killed between two renames: it is whole, and the only one
        if not _in_place(each).exists():
            found.append(each)
    with reading(root / LATEST):
        latest, lines = _latest(root) if found else (None, [])
    reached = sys.maxsize if latest is None else _step(latest)
    return sorted(found, key=lambda each: (_step(each) > reached, -_step(each))), lines


def _latest(root: Path) -> tuple[Path | None, list[str]]:
    """The checkpoint that `latest` names, if there is such a file, and what is wrong with it."""
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
        return root / name, [f"{path}: names {name}, which is not there"]
    return root / name, []


def _step(path: Path) -> int:
    """Of a checkpoint, whatever state its name says."""
    name = parse_name(path)
    assert name is not None, path
    return name.step


def _in_place(path: Path) -> Path:
    """Where this checkpoint belongs when it is whole."""
    return path.with_name(name_of(_step(path)))


def _in_state(root: Path, *states: str) -> list[Path]:
    return [each for each in _listed(root) if (name := parse_name(each)) and name.state in states]


def _check_files(path: Path, files: Sequence[FileEntry], hint: str = "") -> None:
    """Raises UserError unless exactly these files are there (and the manifest), each of its length."""
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
    """Delete what is older than the last `keep` that look whole; says what could not be deleted.

    One that does not look whole is not counted; it goes when it is older than all that are kept.
    """
    kept, old = 1, _in_state(root, "replaced", "deleted")
    for path in checkpoints(root):
        if _step(path) >= step:
            continue
        if kept < keep:
            kept += _looks_whole(path)
        else:
            old.append(path)
    return _delete(old)


def _looks_whole(path: Path) -> bool:
    try:
        _check_files(path, read_manifest(path).files)
    except UserError:
        return False
    return True


def _delete(paths: Sequence[Path]) -> list[str]:
    """First rename, so that nothing half-deleted looks like a checkpoint; says what could not be deleted."""
    lines = []
    for path in paths:
        doomed = path.with_name(name_of(_step(path), "deleted"))
        try:
            if doomed != path:
                _remove(doomed)
                os.rename(path, doomed)
            _remove(doomed)
        except OSError as error:  # will be tried again, and must not end a training
            lines.append(f"{path}: cannot be deleted: {error.strerror or error}")
    return lines


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _clear(root: Path) -> list[str]:
    """Remove what a killed training has left; what it had only moved aside returns to its place."""
    for path in _in_state(root, "replaced"):
        if not _in_place(path).exists():
            with writing(path):
                os.rename(path, _in_place(path))
    return _delete(_in_state(root, "tmp", "replaced", "deleted"))


def _tell(line: str) -> None:
    print(f"hybridpipe: {line}", file=sys.stderr, flush=True)


def _temporary(root: Path, step: int) -> Path:
    return root / name_of(step, "tmp")


def _listed(path: Path) -> list[Path]:
    """What is in a directory; nothing if it is not there."""
    with reading(path):
        return sorted(path.iterdir()) if path.exists() else []
