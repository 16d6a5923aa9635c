"""The documents: README is short, lines wrap, links lead somewhere, and paths that are named exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LOG = ROOT / "docs/log"  # tells of what is gone
PAGES = {
    str(path.relative_to(ROOT)): path
    for path in [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md"))]
    if LOG not in path.parents
}
WIDTH = 100
# Folders whose files are named in the text: those of the repository, and of the package without its name.
REPOSITORY = {"benchmarks", "docs", "examples", "hybridpipe", "launch", "tests"}
PACKAGES = {folder.name for folder in (ROOT / "hybridpipe").iterdir() if folder.is_dir()}


def prose(text: str) -> list[str]:
    """The lines outside of code blocks and tables, without the targets of links."""
    outside = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL).splitlines()
    return [re.sub(r"\]\([^)]*\)", "]()", line) for line in outside if not line.startswith("|")]


def links(text: str) -> list[str]:
    """The targets of a page's links, those to other sites left out."""
    return [each for each in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in each]


def anchors(text: str) -> set[str]:
    """The fragments that lead to a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def paths(text: str) -> set[str]:
    """Paths in backquotes or code blocks: words that begin with a folder of the repository or the package."""
    code = re.findall(r"^```.*?^```|`[^`\n]+`", text, flags=re.MULTILINE | re.DOTALL)
    words = {word.strip("`,;()'\"") for each in code for word in each.split()}
    named = {word for word in words if re.fullmatch(r"[\w.-]+/[\w./-]*", word)}
    return {word for word in named if word.split("/")[0] in REPOSITORY | PACKAGES}


def exists(path: str) -> bool:
    """True for a path of the repository or of the package."""
    return any((base / path).exists() for base in (ROOT, ROOT / "hybridpipe"))


def test_readme_is_short():
    assert len(PAGES["README.md"].read_text().split()) <= 1200


@pytest.mark.parametrize("page", PAGES)
def test_lines_wrap(page):
    assert [line for line in prose(PAGES[page].read_text()) if len(line) > WIDTH] == []


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    broken = []
    for link in links(PAGES[page].read_text()):
        path, _, fragment = link.partition("#")
        target = PAGES[page].parent / path if path else PAGES[page]
        if not target.exists() or (fragment and fragment not in anchors(target.read_text())):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("page", PAGES)
def test_paths_that_are_named_exist(page):
    assert {path for path in paths(PAGES[page].read_text()) if not exists(path)} == set()


@pytest.mark.parametrize("page", [page for page in PAGES if re.match(r"docs/decisions/\d", page)])
def test_a_decision_is_short_and_in_the_index(page):
    assert len(PAGES[page].read_text().split()) <= 200
    assert f"({PAGES[page].name})" in PAGES["docs/decisions/README.md"].read_text()


def test_what_is_looked_for_is_found():
    text = (
        "See [a](b.md#c-d) and `engine/gone.py`, `runs/x`.\n```\nlaunch/gone --x\n```\n## C: d!\n| table |\n"
    )
    assert links(text) == ["b.md#c-d"]
    assert paths(text) == {"engine/gone.py", "launch/gone"}
    assert anchors(text) == {"c-d"}
    assert prose(text)[0] == "See [a]() and `engine/gone.py`, `runs/x`."
    assert "| table |" not in prose(text)
