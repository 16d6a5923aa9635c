"""Manifest of a checkpoint: the list of its contents, a JSON file written last. Pure: text in, text out.

Invariants: `from_text` reads the text of `to_text` as an equal value; a text with a flipped bit has the same
meaning or is refused, because the manifest contains a checksum of its contents.
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

JSON = Any  # a result of json.loads: dicts with str keys, lists, str, int, float, bool, None

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
    """Contents of a checkpoint.

    Args:
        step: minibatches trained on.
        epoch: complete epochs.
        position: minibatches trained on in the next epoch.
        plan: the plan, as in plan.json.
        versions: of hybridpipe, torch and Python.
        run: the train state, as the training describes it.
        files: the other files of the checkpoint.
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
        """Entry of the file of this name; None if there is none."""
        return next((file for file in self.files if file.name == name), None)


def to_text(manifest: Manifest) -> str:
    """The text of manifest.json.

    Raises:
        TypeError: the manifest holds a value that JSON cannot hold.
        ValueError: the manifest would be read as a different one.
    """
    document = {"format": FORMAT, **asdict(manifest)}
    check_json(document, MANIFEST)
    text = json.dumps({**document, "checksum": _checksum(document)}, indent=1) + "\n"
    read_back = from_text(text.encode(), MANIFEST)
    if _checksum(asdict(read_back)) != _checksum(asdict(manifest)):
        raise ValueError(f"{MANIFEST}: would not be read as it was written")
    return text


def from_text(text: bytes, source: str) -> Manifest:
    """Manifest from the text of a file.

    Args:
        source: the file's name, for errors.

    Raises:
        UserError: the text is no manifest, or was damaged.
    """
    document = parse_json(text, source)
    if not isinstance(document, dict):
        raise UserError(f"{source}: must be a JSON object, got {shown(document)}")
    if document.get("format") != FORMAT:
        got = shown(document["format"]) if "format" in document else "none"
        raise UserError(f"{source}: format: must be {FORMAT!r}, got {got}")
    contents = {name: value for name, value in document.items() if name != "checksum"}
    try:
        manifest = parse(Manifest, {name: contents[name] for name in contents if name != "format"}, source)
    except RecursionError:
        raise UserError(f"{source}: is nested too deeply") from None
    if "checksum" not in document:
        raise UserError(f"{source}: checksum: is required, but missing")
    if document["checksum"] != _checksum(contents):
        raise UserError(f"{source}: checksum: does not fit the rest: the file was damaged or edited")
    return manifest


def parse_json(text: bytes | str, source: str) -> JSON:
    """Value of a JSON text; UserError if it is not JSON, or an object has a name twice."""

    def unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise ValueError("a name occurs twice in an object")
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
    """Raise TypeError for a value that JSON would change or cannot hold; a tuple counts as a list."""
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
    """Return the SHA-256 of the contents, whatever the layout of the text."""
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
