"""Disk: files that are hashed while they are written and are on the disk when that is said; bounded reading.

Knows nothing of checkpoints. Invariant: a `NewFile` that could not be finished is not there any more, and the
one line that tells so names it. (safetensors' own writer would have to be read again for the hash, and tells
a watchdog nothing while a slow disk takes a large file; torch.save hides the errno and leaves a part.)
"""

import errno
import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from hybridpipe.checkpoint.manifest import FileEntry
from hybridpipe.comm.status import rank_status
from hybridpipe.errors import UserError
from hybridpipe.files import check_replaceable

CHUNK_BYTES = 1 << 22  # hashed and written at once: large enough for the disk, small enough for the cache
SYNC_BYTES = 1 << 30  # one fsync of a large file at its end could take longer than a watchdog waits


class NewFile:
    """A file that is not there yet; a context that ends well leaves it fsynced, any other leaves none."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._hash = hashlib.sha256()
        self._num_bytes = self._unsynced = 0
        # Exclusively: another training in the same directory is an error, never a mixture.
        with writing(path):
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def __enter__(self) -> "NewFile":
        return self

    def write(self, data: bytes | memoryview) -> None:
        """All of `data`, one byte an item."""
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
        """What has been written so far."""
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
        with suppress(OSError):  # what made the file fail is told; that its rest stays, too, adds nothing
            self.path.unlink()


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Under what name to write a file that takes the place of another when the context ends well."""
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


def sync_directory(path: Path) -> None:
    """Let the names in a directory survive a power cut."""
    with writing(path):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems do not know it
                raise
        finally:
            os.close(descriptor)


@contextmanager
def open_regular(path: Path) -> Iterator[tuple[BinaryIO, int]]:
    """A regular file to read from, unbuffered, and its length in bytes; UserError if there is none.

    A pipe in its place is refused instead of waited for.
    """
    with reading(path):
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb", buffering=0) as file:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise UserError(f"{path}: must be a regular file")
            yield file, found.st_size


def read_bounded(path: Path, most_bytes: int) -> bytes:
    """A file that is known to be small; UserError if it is not."""
    with open_regular(path) as (file, size):
        if size > most_bytes:
            raise UserError(f"{path}: must have at most {most_bytes:,} bytes, got {size:,}")
        return file.read(size)


def read_into(file: BinaryIO, buffer: memoryview, path: Path) -> None:
    """Fill the buffer; UserError if the file ends before."""
    while buffer:
        count = file.readinto(buffer[:CHUNK_BYTES])  # type: ignore[attr-defined]  # FileIO's
        if not count:
            raise UserError(f"{path}: ended while it was read")
        buffer = buffer[count:]


def hash_of(path: Path) -> FileEntry:
    """What is on the disk under this name."""
    digest, num_bytes = hashlib.sha256(), 0
    buffer = memoryview(bytearray(CHUNK_BYTES))
    with open_regular(path) as (file, _):
        while count := file.readinto(buffer):  # type: ignore[attr-defined]
            digest.update(buffer[:count])
            num_bytes += count
    return FileEntry(path.name, num_bytes, digest.hexdigest())


def compare(path: Path, found: FileEntry, listed: FileEntry) -> None:
    """Raises UserError unless a file is what a manifest lists."""
    if found.num_bytes != listed.num_bytes:
        raise UserError(f"{path}: must have {listed.num_bytes:,} bytes, got {found.num_bytes:,}")
    if found.sha256 != listed.sha256:
        raise UserError(
            f"{path}: its SHA-256 must be {listed.sha256[:12]}… as in the manifest, got "
            f"{found.sha256[:12]}…: the file was damaged or exchanged"
        )


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Errors of the operating system in one line that names the file."""
    try:
        yield
    except FileNotFoundError:
        raise UserError(f"{path}: is missing") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Errors of the operating system in one line that names the file."""
    try:
        yield
    except FileExistsError:
        raise UserError(
            f"{path}: is there already: does another training write into this directory?"
        ) from None
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror or error}") from error
