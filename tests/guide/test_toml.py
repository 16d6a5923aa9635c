"""TOML on the pages: a whole configuration is checked as it is, a part of one within examples/digits.toml."""

import json
import tomllib
from typing import Any

import pytest

from hybridpipe.config.file import load_config
from tests.guide.blocks import BLOCKS, ROOT

WHOLE = {"model", "data", "optimizer", "train"}  # the tables without which there is no training


def merged(document: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    """The document with the fields of a part of one, table by table."""
    both = {
        name: {**document.get(name, {}), **table} if isinstance(table, dict) else table
        for name, table in part.items()
    }
    return document | both


def toml(value: Any) -> str:
    """A value in one line of TOML."""
    match value:
        case dict():
            return f"{{ {', '.join(f'{name} = {toml(each)}' for name, each in value.items())} }}"
        case list():
            return f"[{', '.join(map(toml, value))}]"
    return json.dumps(value)


@pytest.mark.parametrize(
    "block", [block for block in BLOCKS if block.language == "toml"], ids=lambda block: block.place
)
def test_a_configuration_loads(block, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    document = tomllib.loads(block.text)
    if not document.keys() >= WHOLE:
        document = merged(tomllib.loads((ROOT / "examples/digits.toml").read_text()), document)
    path = tmp_path / "config.toml"
    path.write_text("".join(f"{name} = {toml(value)}\n" for name, value in document.items()))
    load_config(path).check()
