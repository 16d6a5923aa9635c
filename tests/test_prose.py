"""Prose of docstrings and pages: first sentences name the thing, and no text has a banned phrase.

ruff asks for docstrings of public names. Pages are those of `test_documents.py`, without the log.
"""

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_documents import PAGES

PACKAGE = Path(importlib.util.find_spec("hybridpipe").origin).parent
SOURCES = {str(path.relative_to(PACKAGE.parent)): path for path in sorted(PACKAGE.rglob("*.py"))}

# A first sentence names the thing or begins with a verb. These words begin something else: a clause in a
# noun's place ("What a rank does"), a sentence without its beginning ("Of each stage", "On rank 0 the ..."),
# a question ("Is it ready?"), or a sentence with a subject that is not the thing ("There is none").
CLAUSES = "What Whatever Whether How Where When Who Whoever Whom Whose Why Which That If Unless Because So"
MIDDLES = (
    "Of As For In On Under Over At By To From With Within Without After Before Between Around Inside Outside "
    "Until While During Since And Or But Nor Not"
)
QUESTIONS = "Is Are Was Does Do Did Has Have Had Can May Must Will Would Should"
OTHER_SUBJECTS = "It There They"
FORBIDDEN_OPENINGS = frozenset(f"{CLAUSES} {MIDDLES} {QUESTIONS} {OTHER_SUBJECTS}".split())

FIRST_SENTENCE = re.compile(r"""(.*?[.:?!])["')`]*(?:\s|$)""", re.DOTALL)
BEGINNING = re.compile(r"[A-Z0-9`]")  # a term of the code stands in backticks

Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = ast.Module | ast.ClassDef | Function


def things(tree: ast.Module) -> Iterator[tuple[str, Definition]]:
    """The module, its classes, functions and methods by name, in order."""

    def inside(node: ast.AST, prefix: str) -> Iterator[tuple[str, Definition]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | Function):
                yield prefix + child.name, child
                yield from inside(child, f"{prefix}{child.name}.")
            else:
                yield from inside(child, prefix)  # below an `if`, a `try`, a `with`

    yield "module", tree
    yield from inside(tree, "")


def mistake(docstring: str) -> str | None:
    """The rule that a docstring's first sentence breaks."""
    paragraph = docstring.split("\n\n")[0].strip()
    if re.split(r"\W", paragraph)[0] in FORBIDDEN_OPENINGS:
        return "begins with a forbidden word"
    if not BEGINNING.match(paragraph):
        return "begins without a capital letter"
    first = FIRST_SENTENCE.match(paragraph)
    if first is None or first[1][-1] not in ".:":
        return "has no first sentence with a full stop"
    return None


def offenders(path: str, source: str) -> list[str]:
    """One line for each docstring that breaks a rule: `path:line name: opening (rule)`."""
    return [
        f"{path}:{getattr(node, 'lineno', 1)} {name}: {docstring.splitlines()[0][:60]!r} ({rule})"
        for name, node in things(ast.parse(source))
        if (docstring := ast.get_docstring(node)) and (rule := mistake(docstring))
    ]


# Phrases of no field, or of another meaning in this one, and what to write instead.
PHRASES = {
    r"\bso many\b": "as many, that many, or the count's name",
    r"\banew\b(?!:)": "again, or from the beginning",
    r"\bshar(?:e|es|ed|ing)(?:[- ](?:it|them|its \w+|their \w+))?[- ](?-i:out)\b": "shard, or divide",
    r"\bway round\b": "workaround",
    r"\btold\b(?!:)": "reported, said, printed",
    r"\btells\b": "says, reports, shows",
    r"\btell (?:what|which|that|how|why)\b": "say, report, show",
    r", too\b(?! \w)": "as well, or also",
    r"\b(?:without|present|no|whose|(?:tensor|parameter|model|gradient)s?'s?) numbers\b": "values, weights",
    r"\bnumbers (?:gone bad|later)\b": "NaN and infinity; values, weights",
    r"\bwhat (?:an?|the|each|every) \w+ (?:does|do|gives?|costs?)\b(?! not)": "the noun: calls, times, costs",
    r"\bwhat there is of\b": "the noun",
}
CODE = re.compile(r"^```.*?^```|`[^`]*`|\]\([^)]*\)", re.MULTILINE | re.DOTALL)  # and the targets of links


def banned(text: str) -> list[str]:
    """One line for each banned phrase of a text: the phrase and what to write instead."""
    plain = re.sub(r"\s+", " ", CODE.sub("`", text))
    return [
        f"{plain[max(found.start() - 30, 0) : found.end() + 20]!r} (write: {instead})"
        for phrase, instead in PHRASES.items()
        for found in re.finditer(phrase, plain, re.IGNORECASE)
    ]


@pytest.mark.parametrize("page", PAGES)
def test_pages_have_no_banned_phrase(page: str):
    found = banned(PAGES[page].read_text())
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize("path", SOURCES)
def test_docstrings_have_no_banned_phrase(path: str):
    docstrings = (
        (name, ast.get_docstring(node)) for name, node in things(ast.parse(SOURCES[path].read_text()))
    )
    found = [f"{name}: {each}" for name, text in docstrings if text for each in banned(text)]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    "text",
    [
        "After so\nmany steps.",
        "It begins anew.",
        "Replicas share out their update.",
        "It shares them out.",
        "Way round: cut elsewhere.",
        "The error is told once.",
        "A line tells why.",
        "It can tell which.",
        "Gradients, too.",
        "| gradients, too |",
        "A tensor without numbers.",
        "The gradient's numbers.",
        "It shows what a rank does.",
        "What there is of an epoch.",
    ],
)
def test_each_phrase_is_found(text: str):
    assert len(banned(text)) == 1


@pytest.mark.parametrize(
    "text",
    [
        "As many steps; `so many`.",
        "It is, too long or not.",
        "Random numbers.",
        "```\nso many\n```\n",
        "Args:\n told: a text",
    ],
)
def test_good_phrases_pass(text: str):
    assert banned(text) == []


@pytest.mark.parametrize("path", SOURCES)
def test_docstrings_name_the_thing_first(path: str):
    found = offenders(path, SOURCES[path].read_text())
    assert not found, "\n" + "\n".join(found)


HEADER = '"""Things for tests."""\n'


@pytest.mark.parametrize(
    "source, offence",
    [
        ("'''What is here.'''", "1 module: 'What is here.' (begins with a forbidden word)"),
        (HEADER + "def _f(): 'Whether it is.'", "2 _f: 'Whether it is.' (begins with a forbidden word)"),
        (
            HEADER + "def f():\n    'A thing.'\n    def g(): 'Of f.'",
            "4 f.g: 'Of f.' (begins with a forbidden word)",
        ),
        (HEADER + "class A:\n    'As B.'", "2 A: 'As B.' (begins with a forbidden word)"),
        (HEADER + "def f(): 'As'", "2 f: 'As' (begins with a forbidden word)"),
        (HEADER + "def f(): 'returns x.'", "2 f: 'returns x.' (begins without a capital letter)"),
        (HEADER + "def f(): '(a, b): a pair.'", "2 f: '(a, b): a pair.' (begins without a capital letter)"),
        (HEADER + "def f(): 'Return x'", "2 f: 'Return x' (has no first sentence with a full stop)"),
        (HEADER + "def f(): 'Ready?'", "2 f: 'Ready?' (has no first sentence with a full stop)"),
        (
            HEADER + "def f(): 'Return x\\n\\nand more.'",
            "2 f: 'Return x' (has no first sentence with a full stop)",
        ),
    ],
)
def test_each_rule_can_fail(source: str, offence: str):
    assert offenders("bad.py", source) == [f"bad.py:{offence}"]


@pytest.mark.parametrize(
    "source",
    [
        "def _f(): pass",
        "def f(): '`a / b` rounded up.'",
        "def f(): 'Seconds of each layer:\\n\\n    a table'",
        "def f():\n    '''Return x, which is\n    long (in metres.) More.'''",
        "def f(): 'Format of the file, read by g.'",
    ],
)
def test_good_docstrings_pass(source: str):
    assert offenders("good.py", HEADER + source) == []
