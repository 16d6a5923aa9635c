"""Manifest: what a checkpoint consists of, as the JSON file that is written last into it.

Pure: text in, text out; neither files nor torch are known here. Invariant: what `to_text` writes, `from_text`
reads as an equal value, and a text in which a bit was flipped either says the same or is refused, as the
manifest carries a checksum of what it says.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hybridpipe.errors import UserError, shown
from hybridpipe.files import parse
from hybridpipe.planning.checks import non_negative_int

FORMAT = "hybridpipe-checkpoint/1"
MANIFEST = "manifest.json"

JSON = Any  # what json.loads gives: dicts with str keys, lists, str, int, float, bool, None

_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")  # no separator, and no leading dot
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class FileEntry:
    """One file of a checkpoint: its name in the directory, its length and the SHA-256 of its bytes in hex."""

    name: str
    num_bytes: int
    sha256: str

    def __post_init__(self) -> None:
        if not _FILE_NAME.fullmatch(self.name) or self.name == MANIFEST:
            raise ValueError(f"name must be a plain file name other than {MANIFEST}, got {shown(self.name)}")
        non_negative_int("num_bytes", self.num_bytes)
        if not _SHA256.fullmatch(self.sha256):
            raise ValueError(f"sha256 must be 64 hexadecimal digits in lower case, got {shown(self.sha256)}")


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint was taken of.

    Args:
        step: minibatches trained on.
        epoch, position: that many epochs are complete, and so many minibatches of the next one.
        plan: as in plan.json.
        versions: of hybridpipe, torch and what else wrote it.
        run: whatever the training wants to know about itself.
    """

    step: int
    epoch: int
    position: int
    plan: dict[str, Any]
    versions: dict[str, str]
    run: dict[str, Any]
    files: tuple[FileEntry, ...]

    def __post_init__(self) -> None:
        for name in ("step", "epoch", "position"):
            non_negative_int(name, getattr(self, name))
        if not self.files:
            raise ValueError("files must name at least one file, got none")
        names = Counter(file.name for file in self.files)
        if twice := [name for name, count in names.items() if count > 1]:
            raise ValueError(f"files must name every file once, got {twice[0]!r} twice")

    def entry(self, name: str) -> FileEntry | None:
        """The file of this name, if the checkpoint has one."""
        return next((file for file in self.files if file.name == name), None)


def to_text(manifest: Manifest) -> str:
    """The text of manifest.json.

    Raises:
        TypeError, ValueError: the manifest holds what JSON cannot give back as it was.
    """
    document = {"format": FORMAT, **asdict(manifest)}
    check_json(document, MANIFEST)
    text = json.dumps({**document, "checksum": _checksum(document)}, indent=1) + "\n"
    read_back = from_text(text.encode(), MANIFEST)
    if _checksum(asdict(read_back)) != _checksum(asdict(manifest)):
        raise ValueError(f"{MANIFEST}: would not be read as it was written")
    return text


def from_text(text: bytes, source: str) -> Manifest:
    """The manifest that a file says.

    Raises:
        UserError: it is not one, or was damaged; `source` names the file.
    """
    document = parse_json(text, source)
    if not isinstance(document, dict):
        raise UserError(f"{source}: must be a JSON object, got {shown(document)}")
    if document.get("format") != FORMAT:
        got = shown(document["format"]) if "format" in document else "none"
        raise UserError(f"{source}: format: must be {FORMAT!r}, got {got}")
    said = {name: value for name, value in document.items() if name != "checksum"}
    try:
        manifest = parse(Manifest, {name: said[name] for name in said if name != "format"}, source)
    except RecursionError:
        raise UserError(f"{source}: is nested too deeply") from None
    if "checksum" not in document:
        raise UserError(f"{source}: checksum: is required, but missing")
    if document["checksum"] != _checksum(said):
        raise UserError(f"{source}: checksum: does not fit the rest: the file was damaged or edited")
    return manifest


def parse_json(text: bytes | str, source: str) -> JSON:
    """JSON, strictly: no name twice in an object. UserError if it is not."""

    def unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise ValueError("a name stands twice in an object")
        return found

    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        return json.loads(text, object_pairs_hook=unique)
    except UnicodeDecodeError as error:
        raise UserError(f"{source}: must be UTF-8 text, got byte {error.object[error.start]:#x}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{source}: must be JSON: {error}") from None


def check_json(value: JSON, where: str) -> None:
    """Raises TypeError for what JSON would change or cannot hold; a tuple counts as a list."""
    match value:
        case dict():
            for name, item in value.items():
                if not isinstance(name, str):
                    raise TypeError(f"{where}: JSON has only strings as names, got {shown(name)}")
                check_json(item, f"{where}.{name}")
        case list() | tuple():
            for i, item in enumerate(value):
                check_json(item, f"{where}[{i}]")
        case str() | int() | float() | None:
            pass
        case _:
            raise TypeError(f"{where}: JSON cannot hold {shown(value)} of type {type(value).__name__}")


def _checksum(document: dict[str, Any]) -> str:
    """Of what is said, however it is laid out."""
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
