"""Settings: a configuration's tables as TOML, for people and for `tomllib`.

Pure. Invariant: what is written is read back equal.
"""

import json
from collections.abc import Mapping
from typing import Any


def toml_text(tables: Mapping[str, Any]) -> str:
    """Return tables, and lists of tables, as TOML text; a table within one of them is inline."""
    parts = [
        _table(f"[[{name}]]" if isinstance(found, list) else f"[{name}]", table)
        for name, found in tables.items()
        for table in (found if isinstance(found, list) else [found])
    ]
    return "\n\n".join(parts)


def _table(heading: str, table: Mapping[str, Any]) -> str:
    return "\n".join([heading, *(f"{_key(key)} = {_value(value)}" for key, value in table.items())])


def _key(name: str) -> str:
    return (
        name if name and name.isascii() and name.replace("_", "").replace("-", "").isalnum() else _text(name)
    )


def _value(value: Any) -> str:
    match value:
        case Mapping():
            inner = ", ".join(f"{_key(key)} = {_value(item)}" for key, item in value.items())
            return f"{{ {inner} }}" if inner else "{}"
        case list() | tuple():
            return f"[{', '.join(map(_value, value))}]"
        case str():
            return _text(value)
    return json.dumps(value)


def _text(value: str) -> str:
    """Return a basic string; JSON's escapes are TOML's, but for the character 127."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
