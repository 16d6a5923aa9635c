import re

import pytest

from hybridpipe.run_folder.page.html import Figure, Lines, Listing, Page, Section, Table, render
from tests.report.made import EVIL
from tests.report.pages import Tree

EMPTY = Page("digits", "training", (), (), None, ())


def page(*blocks, **fields) -> Tree:
    return Tree(render(Page(**{**EMPTY.__dict__, **fields, "sections": (Section("Section", blocks),)})))


def test_every_text_is_escaped():
    seen = page(
        Lines((EVIL,)),
        Listing(EVIL),
        Table([{EVIL: EVIL}], EVIL, title=EVIL),
        title=EVIL,
        of=EVIL,
        facts=(EVIL,),
        figures=(Figure(EVIL, EVIL, EVIL),),
        warnings=(EVIL,),
    )
    assert {tag for tag, _ in seen.tags} & {"script"} == set()
    in_head, in_header, in_sections = 2, 7, 6
    assert seen.text.count(EVIL) == in_head + in_header + in_sections


def test_a_page_loads_nothing_and_runs_nothing():
    text = render(EMPTY)
    assert Tree(text).addresses() == {"data:,"}
    assert re.findall(r"https?://|//[a-z]|url\(|@import|<script|\son\w+=", text) == []


@pytest.mark.parametrize(
    "cell, style",
    [
        ("12.5 ms", "number"),
        ("1,024", "number"),
        ("-", "number"),
        ("±93%", "number"),
        ("1.30x", "number"),
        ("2.52 MB of 9.27 GB", "number"),
        ("3.29 GB/s", "number"),
        ("10.7 GB (RAM)", "number"),
        ("1e-05", "number"),
        ("2-1", "words"),
        ("1f1b", "words"),
        ("0-3,8", "words"),
        ("0 .. 3 (4)", "words"),
        ("auto", "words"),
    ],
)
def test_columns_of_numbers_stand_to_the_right(cell, style):
    assert Table([{"name": "1", "of": cell}]).columns == {"name": "number", "of": style}


def test_sections_without_content_are_left_out():
    assert "Section" not in page().text and "Section" in page(Lines(("x",))).text


def test_the_chosen_row_stands_out_and_first_cells_are_links():
    seen = page(Table([{"run": "auto"}, {"run": "dp"}], chosen=1, links={"auto": "auto/round0/report.html"}))
    assert [attributes.get("class") for tag, attributes in seen.tags if tag == "tr"] == [None, None, "chosen"]
    assert "auto/round0/report.html" in seen.addresses()


@pytest.mark.parametrize(
    "warnings, told",
    [(None, []), ((), ["no warnings"]), (("a",), ["1 warning"]), (("a", "b"), ["2 warnings"])],
)
def test_warnings_are_counted(warnings, told):
    text = page(warnings=warnings).text
    assert re.findall(r"no warnings|\d warnings?", text) == told
