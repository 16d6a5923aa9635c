"""Disk: files that are hashed and fsynced while they are written, and reading of bounded size.

Checkpoints are not known here. Invariant: an unfinished `NewFile` is removed, and the error names it in one
line. safetensors' writer would need a second pass for the hash, and torch.save hides the errno.
"""

import errno
import hashlib
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from hybridpipe.checkpoint.manifest import FileEntry
from hybridpipe.comm.status import rank_status
from hybridpipe.errors import UserError
from hybridpipe.files import check_replaceable, writing

CHUNK_BYTES = 1 << 22  # written and hashed at a time: large for the disk, small for the cache
SYNC_BYTES = 1 << 30  # between two fsyncs: a single one of a large file could exceed the watchdog's timeout


class NewFile:
    """New file, as a context manager: fsynced after a normal end, removed after an exception."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._hash = hashlib.sha256()
        self._num_bytes = self._unsynced = 0
        # O_EXCL: two trainings in one directory are an error and never mix their files.
        with writing(path):
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def __enter__(self) -> "NewFile":
        return self

    def write(self, data: bytes | memoryview) -> None:
        """Write all of `data`, whose items are bytes."""
        view = memoryview(data)
        with writing(self.path):
            while view:
                written = os.write(self._descriptor, view[:CHUNK_BYTES])
                self._hash.update(view[:written])
                self._num_bytes += written
                view = view[written:]
                rank_status.note_disk_progress()
                self._unsynced += written
                if self._unsynced >= SYNC_BYTES:
                    os.fsync(self._descriptor)
                    self._unsynced = 0

    @property
    def entry(self) -> FileEntry:
        """Name, length and hash of the bytes written so far."""
        return FileEntry(self.path.name, self._num_bytes, self._hash.hexdigest())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            with writing(self.path):
                try:
                    if error is None:
                        os.fsync(self._descriptor)
                finally:
                    os.close(self._descriptor)
        except UserError:
            self._remove()
            raise
        if error is not None:
            self._remove()

    def _remove(self) -> None:
        with suppress(OSError):  # the first error is reported; a remaining part of the file is harmless
            self.path.unlink()


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to; the file replaces `path` when the context ends normally."""
    check_replaceable(path)
    unfinished = path.with_name(f".{path.name}.tmp")
    with writing(path):
        unfinished.unlink(missing_ok=True)
    try:
        yield unfinished
        with writing(path):
            os.replace(unfinished, path)
    except BaseException:
        with suppress(OSError):
            unfinished.unlink()
        raise
    sync_directory(path.parent)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder to write to; it becomes `path`, a new or an empty one, at a normal end.

    Raises:
        UserError: `path` holds something, which stays, or cannot be written.
    """
    path = path.absolute()
    unfinished = path.with_name(f".{path.name}.tmp")
    with writing(path):
        if path.exists() and not (path.is_dir() and not any(path.iterdir())):
            raise UserError(f"{path}: cannot be written: it exists; must be a new or an empty folder")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
    try:
        yield unfinished
        sync_directory(unfinished)
        with writing(path):
            os.rename(unfinished, path)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Fsync a directory, so that its entries survive a power cut."""
    with writing(path):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems lack it
                raise
        finally:
            os.close(descriptor)


@contextmanager
def open_regular(path: Path) -> Iterator[tuple[BinaryIO, int]]:
    """Open a regular file for unbuffered reading; yield it and its length in bytes.

    Raises:
        UserError: there is no such file, or it is another kind, such as a pipe, which is not waited for.
    """
    with reading(path):
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except ValueError as error:  # a null character, or half of a character
            raise UserError(f"{str(path)!r}: no file can have this name: {error}") from None
        with open(descriptor, "rb", buffering=0) as file:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise UserError(f"{path}: must be a regular file")
            yield file, found.st_size


def read_bounded(path: Path, most_bytes: int) -> bytes:
    """Contents of a file; UserError if it is larger than `most_bytes`."""
    with open_regular(path) as (file, size):
        if size > most_bytes:
            raise UserError(f"{path}: must have at most {most_bytes:,} bytes, got {size:,}")
        return file.read(size)


def read_into(file: BinaryIO, buffer: memoryview, path: Path) -> None:
    """Fill the buffer; UserError if the file ends too early."""
    while buffer:
        count = file.readinto(buffer[:CHUNK_BYTES])  # type: ignore[attr-defined]  # a method of FileIO
        if not count:
            raise UserError(f"{path}: ended while it was read")
        buffer = buffer[count:]


def hash_of(path: Path) -> FileEntry:
    """Name, length and hash of a file on the disk."""
    digest, num_bytes = hashlib.sha256(), 0
    buffer = memoryview(bytearray(CHUNK_BYTES))
    with open_regular(path) as (file, _):
        while count := file.readinto(buffer):  # type: ignore[attr-defined]
            digest.update(buffer[:count])
            num_bytes += count
    return FileEntry(path.name, num_bytes, digest.hexdigest())


def compare(path: Path, found: FileEntry, listed: FileEntry) -> None:
    """Raise UserError if a file differs from its entry in the manifest."""
    if found.num_bytes != listed.num_bytes:
        raise UserError(f"{path}: must have {listed.num_bytes:,} bytes, got {found.num_bytes:,}")
    if found.sha256 != listed.sha256:
        raise UserError(
            f"{path}: its SHA-256 must be {listed.sha256[:12]}… as in the manifest, got "
            f"{found.sha256[:12]}…: the file was damaged or replaced"
        )


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn errors of the operating system into a UserError that names the file."""
    try:
        yield
    except FileNotFoundError:
        raise UserError(f"{path}: is missing") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error
