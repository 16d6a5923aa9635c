"""Docstrings of the package: present where a name is public, and a first sentence that names the thing."""

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

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


class Thing(NamedTuple):
    """Something that may have a docstring."""

    name: str
    node: Definition
    is_public: bool
    owner: str | None  # the class whose method it is


def things(tree: ast.Module) -> Iterator[Thing]:
    """The module, its classes, functions and methods, in order; inside of a function nothing is public."""

    def inside(node: Definition, prefix: str, is_public: bool, owner: str | None) -> Iterator[Thing]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | Function):
                public = is_public and not child.name.startswith("_")
                yield Thing(prefix + child.name, child, public, owner)
                is_class = isinstance(child, ast.ClassDef)
                deeper = f"{prefix}{child.name}."
                yield from inside(child, deeper, public and is_class, child.name if is_class else None)
            else:
                yield from inside(child, prefix, is_public, owner)  # below an `if`, a `try`, a `with`

    yield Thing("module", tree, True, None)
    yield from inside(tree, "", True, None)


class Class(NamedTuple):
    """A class as overrides see it: the names of its bases, and its documented methods."""

    bases: set[str]
    documented: set[str]


def classes_of(sources: list[str]) -> dict[str, Class]:
    """All classes by name; classes of one name count as one."""
    found: dict[str, Class] = {}
    for node in (node for source in sources for node in ast.walk(ast.parse(source))):
        if isinstance(node, ast.ClassDef):
            one = found.setdefault(node.name, Class(set(), set()))
            bases = (base.value if isinstance(base, ast.Subscript) else base for base in node.bases)
            one.bases.update(ast.unparse(base).rpartition(".")[2] for base in bases)
            methods = (each for each in node.body if isinstance(each, Function))
            one.documented.update(each.name for each in methods if ast.get_docstring(each))
    return found


def inherits_docstring(
    owner: str, method: str, classes: dict[str, Class], seen: frozenset[str] = frozenset()
) -> bool:
    """True if a base, or a base of one, documents the method."""
    bases = (classes.get(owner, Class(set(), set())).bases & classes.keys()) - seen
    return any(
        method in classes[base].documented or inherits_docstring(base, method, classes, seen | {base})
        for base in bases
    )


def may_lack_docstring(thing: Thing, classes: dict[str, Class]) -> bool:
    """True if the thing is private, sets or deletes a property, or overrides a documented method."""
    if not thing.is_public:
        return True
    decorators = {ast.unparse(each).rpartition(".")[2] for each in getattr(thing.node, "decorator_list", [])}
    if decorators & {"setter", "deleter", "overload"}:
        return True
    return thing.owner is not None and inherits_docstring(thing.owner, thing.node.name, classes)


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


def offenders(path: str, source: str, classes: dict[str, Class]) -> list[str]:
    """One line for each docstring that is missing or breaks a rule: `path:line name: opening (rule)`."""
    lines = []
    for thing in things(ast.parse(source)):
        docstring = ast.get_docstring(thing.node)
        where = f"{path}:{getattr(thing.node, 'lineno', 1)} {thing.name}"
        if docstring:
            if rule := mistake(docstring):
                lines.append(f"{where}: {docstring.splitlines()[0][:60]!r} ({rule})")
        elif not may_lack_docstring(thing, classes):
            lines.append(f"{where}: (no docstring)")
    return lines


@pytest.fixture(scope="module")
def classes() -> dict[str, Class]:
    return classes_of([path.read_text() for path in SOURCES.values()])


@pytest.mark.parametrize("path", SOURCES)
def test_docstrings_name_the_thing_first(path: str, classes: dict[str, Class]):
    found = offenders(path, SOURCES[path].read_text(), classes)
    assert not found, "\n" + "\n".join(found)


HEADER = '"""Things for tests."""\n'


@pytest.mark.parametrize(
    "source, offence",
    [
        ("x = 1", "1 module: (no docstring)"),
        (HEADER + "def f(): pass", "2 f: (no docstring)"),
        (HEADER + "async def f(): pass", "2 f: (no docstring)"),
        (HEADER + "class A: pass", "2 A: (no docstring)"),
        (HEADER + "if x:\n    def f(): pass", "3 f: (no docstring)"),
        (HEADER + "class A:\n    'A thing.'\n    def f(self): pass", "4 A.f: (no docstring)"),
        (
            HEADER + "class A:\n    'A thing.'\n    @property\n    def f(self): pass",
            "5 A.f: (no docstring)",
        ),
        (HEADER + "class A(B):\n    'A thing.'\n    def f(self): pass", "4 A.f: (no docstring)"),
        (
            HEADER + "class B:\n    'A thing.'\n    def g(self): 'A thing.'\n"
            "class A(B):\n    'A thing.'\n    def f(self): pass",
            "7 A.f: (no docstring)",
        ),
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
    assert offenders("bad.py", source, classes_of([source])) == [f"bad.py:{offence}"]


@pytest.mark.parametrize(
    "source",
    [
        "def _f(): pass",
        "def f():\n    'Return x.'\n    def g(): pass",
        "class _A:\n    def f(self): pass",
        "class A:\n    'A thing.'\n    def __init__(self): pass",
        "class A:\n    'A thing.'\n    @f.setter\n    def f(self, x): pass",
        "class B:\n    'A thing.'\n    def f(self): 'Return x.'\n"
        "class C(B): 'A thing.'\nclass A(a.C[int]):\n    'A thing.'\n    def f(self): pass",
        "def f(): '`a / b` rounded up.'",
        "def f(): 'Seconds of each layer:\\n\\n    a table'",
        "def f():\n    '''Return x, which is\n    long (in metres.) More.'''",
        "def f(): 'Format of the file, read by g.'",
    ],
)
def test_good_docstrings_pass(source: str):
    assert offenders("good.py", HEADER + source, classes_of([source])) == []
