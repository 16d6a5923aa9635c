"""Python on the pages of the guide: each page runs from top to bottom, as its reader would run it."""

import re

import pytest

import hybridpipe
from tests.guide import reader
from tests.guide.blocks import PAGES, README, Block
from tests.guide.exceptions import is_excused
from tests.libraries import skip_without_transformers

# Their programs run on two ranks: test_readme.py, test_sharp_bits.py.
ON_TWO_RANKS = (README, "docs/guide/sharp-bits.md")


def python_of(page: str) -> list[Block]:
    """The programs of a page that are to be run."""
    return [each for each in PAGES[page] if each.language == "python" and not is_excused(each)]


def more(block: Block, table: dict[tuple[str, str], str]) -> str:
    """What a table of `reader` has for the block."""
    return "\n".join(
        code for (page, first), code in table.items() if page == block.page and block.text.startswith(first)
    )


def usual_trainer(usual: dict[str, object]):
    """Trainer with the usual arguments where none are given: what `...` leaves out."""
    real = hybridpipe.Trainer
    return lambda *model, **given: real(**usual | dict(zip(["model"], model)) | given)


@pytest.mark.parametrize("page", [page for page in PAGES if page not in ON_TWO_RANKS and python_of(page)])
def test_a_page_runs_from_top_to_bottom(page, quick, tmp_path, monkeypatch):
    blocks = python_of(page)
    if any("transformers" in more(block, reader.BEFORE) + block.text for block in blocks):
        skip_without_transformers()
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    exec(reader.AT_HAND, namespace)
    trainer = usual_trainer(namespace["usual"])
    for block in blocks:
        program = re.sub(r"\.\.\.(?=[,)])", "*()", block.text)  # valid anywhere among arguments
        exec(more(block, reader.BEFORE), namespace)
        with monkeypatch.context() as changed:
            if program != block.text:
                changed.setattr(hybridpipe, "Trainer", trainer)
            try:
                exec(compile("\n" * block.line + program, block.page, "exec"), namespace)
            except NameError as error:
                remedy = "make it there, or give it to the reader in tests/guide/reader.py"
                pytest.fail(f"{block.place}: {error}: {remedy}", pytrace=False)
        exec(more(block, reader.AFTER), namespace)


def test_what_is_given_to_a_block_has_its_block():
    blocks = [block for page in PAGES for block in python_of(page)]
    for page, first in reader.BEFORE | reader.AFTER:
        assert any(block.page == page and block.text.startswith(first) for block in blocks), (page, first)
