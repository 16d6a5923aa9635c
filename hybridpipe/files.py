"""Files: plans, profiles and clusters as JSON, read strictly and never half-written.

Not known here: the rules of a value, which its dataclass checks. Invariant: every mistake is a `UserError` of
one line, such as `plan.json: stages[1].replicas: must be an integer >= 1, got -1`.
"""

import json
import math
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, TextIO, TypeVar, get_args, get_type_hints

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails, SchemaValidator, to_jsonable_python

from hybridpipe.errors import UserError, shown, suggest
from hybridpipe.planning.cluster import CLUSTER_FORMAT, Cluster
from hybridpipe.planning.graph.graph import LayerGraph
from hybridpipe.planning.graph.linearise import narrow_order
from hybridpipe.planning.graph.pipedream_format import parse_graph
from hybridpipe.planning.plan import PLAN_FORMAT, Plan
from hybridpipe.planning.profile import PROFILE_FORMAT, ModelProfile

T = TypeVar("T")

# Limit for a file that is read as text. A profile of 10,000 layers in five sizes has 25 MB; parsed JSON takes
# up to thirty times its bytes in memory.
MOST_BYTES = 2**26
_WIDTH = 170  # columns; JSON that fits stays on one line, as each stage of a plan does
_UNION_BRANCHES = ("int", "tuple[int, ...]")  # pydantic inserts these names into the location of a mistake
_LEADING = ("format", "num_layers", "schedule", "num_microbatches")  # fields that are written first


def read_plan(path: str | Path) -> Plan:
    """Read a plan.json; `predicted`, `num_layers` and all the `ranks` may be left out.

    Raises:
        UserError: the file cannot be read, or holds no valid plan.
    """
    return read_json(path, Plan, PLAN_FORMAT)


def read_profile(path: str | Path) -> ModelProfile:
    """Read a profile.json. Raises UserError as `read_plan` does."""
    return read_json(path, ModelProfile, PROFILE_FORMAT)


def read_cluster(path: str | Path) -> Cluster:
    """Read a cluster.json. Raises UserError as `read_plan` does."""
    return read_json(path, Cluster, CLUSTER_FORMAT)


def read_pipedream_graph(path: str | Path) -> LayerGraph:
    """Read the layer graph in a graph.txt of PipeDream's profiler. Raises UserError as `read_plan` does."""
    text = read_text(path)
    try:
        return parse_graph(text)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None


def read_costs(path: str | Path, samples: int | None) -> ModelProfile:
    """Read the profile of a microbatch from a profile.json or a graph.txt.

    Args:
        samples: size of the microbatch, to which a profile is scaled; None: the profile's own. A graph.txt
            does not state its size; it is taken to be this one.

    Raises:
        UserError: as `read_plan`.
    """
    if Path(path).suffix == ".txt":
        graph = read_pipedream_graph(path)
        return graph.profile(narrow_order(graph), samples or 1, "published")
    profile = read_profile(path)
    return profile.scaled_to(samples or profile.samples)


def write_json(path: str | Path, value: Any) -> None:
    """Write a dataclass or a dict; a reader sees the old file or the new one, never a part.

    NaN and infinity, which JSON does not have, become null.

    Raises:
        UserError: the file cannot be written.
    """
    document = to_jsonable_python(value, inf_nan_mode="null")
    if is_dataclass(value):  # optional fields without a value are left out; in a dict, None is a value
        document = _present(document)
    document = {name: document[name] for name in _LEADING if name in document} | document
    write_text(path, _text(document) + "\n")


def write_text(path: str | Path, text: str) -> None:
    """Write a whole text file at once, as `write_json` does.

    Raises:
        UserError: the file cannot be written.
    """
    path = Path(path)
    check_replaceable(path)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with writing(path):
        try:
            unfinished.write_text(text, encoding="utf-8")
            os.replace(unfinished, path)
        finally:
            unfinished.unlink(missing_ok=True)


def open_after(path: str | Path, is_kept: Callable[[str], bool]) -> TextIO:
    """Open a text file to append to, without its lines from the first on that is cut short or not kept.

    Args:
        is_kept: called with each line.

    Raises:
        UserError: the file cannot be written.
    """
    path = Path(path)
    check_replaceable(path)
    with writing(path):
        with path.open("ab+") as file:
            file.seek(0)
            end = 0
            for line in file:
                if not (line.endswith(b"\n") and is_kept(line.decode("utf-8", "replace"))):
                    break
                end += len(line)
            file.truncate(end)
        return path.open("a", encoding="utf-8", newline="")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn errors of the operating system into a UserError that names the file."""
    try:
        yield
    except FileExistsError:
        raise UserError(f"{path}: exists already: does another training write to this directory?") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror or error}") from error


def check_replaceable(path: Path) -> None:
    """Raise UserError for a folder or a device, which a rename would replace as it does a file."""
    if path.exists() and not path.is_file():
        raise UserError(f"{path}: cannot be written: it exists and is no regular file")


def read_text(path: str | Path) -> str:
    """Read the text of a regular file.

    Raises:
        UserError: the file has more than MOST_BYTES, is no UTF-8 text, or cannot be read. A pipe or a device
            is refused, because reading one may wait forever.
    """
    try:
        found = Path(path).stat()
        if stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode):  # reading a directory fails by itself
            if found.st_size > MOST_BYTES:
                raise UserError(f"{path}: must have at most {MOST_BYTES:,} bytes, got {found.st_size:,}")
            return Path(path).read_text(encoding="utf-8")
        raise UserError(f"{path}: must be a regular file")
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: must be UTF-8 text, got byte {error.object[error.start]:#x}") from error


def parse(kind: type[T], document: dict[str, Any], source: str) -> T:
    """Build a dataclass from the tables of JSON or TOML, without unknown fields and without type conversions.

    Args:
        source: file's name, for messages.

    Raises:
        UserError: the first mistake; unknown names come before all others.
    """
    try:
        _check_values(document, "")
        validator = _validator(kind)  # type: ignore[arg-type]  # a type is hashable
        value: T = validator.validate_json(json.dumps(document), strict=True, extra="forbid")
        return value
    except ValidationError as error:
        mistakes = error.errors(include_url=False)
        unknown = [each for each in mistakes if each["type"] == "unexpected_keyword_argument"]
        raise UserError(f"{source}: {_message(kind, (unknown or mistakes)[0])}") from None
    except UserError as error:
        raise UserError(f"{source}: {error}") from None


@cache
def _validator(kind: type) -> SchemaValidator:
    """Return pydantic's validator, which stops at a list's first wrong item instead of reporting millions."""
    return SchemaValidator(_stopping_early(TypeAdapter(kind).core_schema))


def _stopping_early(schema: Any) -> Any:
    match schema:
        case dict():
            more = {"fail_fast": True} if schema.get("type") in ("list", "tuple") else {}
            return {name: _stopping_early(part) for name, part in schema.items()} | more
        case list():
            return [_stopping_early(part) for part in schema]
    return schema


def read_object(path: str | Path) -> dict[str, Any]:
    """Read a file's JSON object, whose fields are not checked.

    Raises:
        UserError: the file cannot be read, or holds no JSON object.
    """
    text = read_text(path)
    if not text.strip():
        raise UserError(f"{path}: must be a JSON object, got an empty file")
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: must be JSON: {error}") from None
    if not isinstance(document, dict):
        raise UserError(f"{path}: must be a JSON object, got {shown(document)}")
    return document


def read_json(path: str | Path, kind: type[T], file_format: str) -> T:
    """Read a dataclass of a format. Raises UserError as `read_plan` does."""
    document = read_object(path)
    if document.get("format") != file_format:
        got = shown(document["format"]) if "format" in document else "none"
        raise UserError(f"{path}: format: must be {file_format!r}, got {got}")
    return parse(kind, document, str(path))


def _check_values(value: Any, path: str) -> None:
    """Raise UserError for a value that JSON cannot hold, or an integer of more than 64 bits."""
    match value:
        case dict():
            for name, item in value.items():
                _check_values(item, f"{path}.{name}".removeprefix("."))
        case list():
            for i, item in enumerate(value):
                _check_values(item, f"{path}[{i}]")
        case float() if not math.isfinite(value):
            raise UserError(f"{path}: must be a finite number, got {value}")
        case int() if not -(2**63) <= value < 2**63:
            raise UserError(f"{path}: must be an integer of at most 64 bits, got {shown(value)}")
        case str() | float() | int() | None:
            pass
        case _:
            raise UserError(f"{path}: must be a string, a number or a boolean, got {value}")


def _message(kind: type, mistake: ErrorDetails) -> str:
    """Return pydantic's mistake as "field: must be ..., got ..."."""
    location = [part for part in mistake["loc"] if part not in _UNION_BRANCHES]
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    path = "".join(parts).removeprefix(".")
    match mistake["type"]:
        case "unexpected_keyword_argument":
            return f"{path}: unknown field{suggest(str(location[-1]), _fields_at(kind, location[:-1]))}"
        case "missing":
            return f"{path}: is required, but missing"
        case "value_error":  # from a dataclass's own check; its text begins with the field's name
            text = str(mistake["ctx"]["error"])
            if named := re.fullmatch(r"([\w.\[\]]+) (must .*)", text):
                field = named[1].removeprefix(f"{path}.")
                return f"{path}.{field}: {named[2]}".removeprefix(".")
            return f"{path}: {text}".removeprefix(": ")
        case _:
            allowed = mistake["msg"].removeprefix("Input should be ")
            return f"{path}: must be {allowed}, got {shown(mistake['input'])}"


def _fields_at(kind: Any, location: Sequence[int | str]) -> list[str]:
    """Return the field names of the dataclass at a location of the file."""
    for part in location:
        kind = get_args(kind)[0] if isinstance(part, int) else get_type_hints(kind)[part]
        if type(None) in get_args(kind):  # X | None
            kind = get_args(kind)[0]
    return [field.name for field in fields(kind) if field.init]


def _present(value: Any) -> Any:
    """Return the value without fields that are None, at any depth."""
    match value:
        case dict():
            return {name: _present(item) for name, item in value.items() if item is not None}
        case list():
            return [_present(item) for item in value]
    return value


def _text(value: Any, indent: str = "") -> str:
    """Return JSON in lines of at most `_WIDTH` columns, as far as its strings and numbers allow."""
    line = json.dumps(value, ensure_ascii=False)
    if len(indent) + len(line) <= _WIDTH or not isinstance(value, dict | list):
        return line
    inner = f"{indent}  "
    if isinstance(value, dict):
        items = [f"{json.dumps(name)}: {_text(item, inner)}" for name, item in value.items()]
    else:
        items = [_text(item, inner) for item in value]
    opening, closing = line[0], line[-1]
    return f"{opening}\n{inner}" + f",\n{inner}".join(items) + f"\n{indent}{closing}"
