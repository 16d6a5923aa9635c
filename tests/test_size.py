"""The package stays small: ceilings of what grows unseen. They move down, or by a decision (0058)."""

import ast
import importlib.util
import inspect
from collections import defaultdict
from pathlib import Path

import pytest

from hybridpipe import Trainer

PACKAGE = Path(importlib.util.find_spec("hybridpipe").origin).parent
SOURCES = {str(path.relative_to(PACKAGE)): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
TREES = {name: ast.parse(source) for name, source in SOURCES.items()}
MOST_OF_A_FILE, MOST_OF_ALL = 400, 34_164  # lines of code
MOST_ARGUMENTS = 14  # of Trainer


def code_lines(source: str) -> int:
    """Return the number of lines without docstrings, comments and blanks."""
    of_docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            and ast.get_docstring(node) is not None
        ):
            of_docstrings.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    lines = enumerate(map(str.strip, source.splitlines()), 1)
    return sum(bool(line) and line[0] != "#" and i not in of_docstrings for i, line in lines)


def test_no_file_is_long_and_the_package_does_not_grow():
    lines = {name: code_lines(source) for name, source in SOURCES.items()}
    assert {name for name, count in lines.items() if count > MOST_OF_A_FILE} == set()
    assert sum(lines.values()) <= MOST_OF_ALL


def test_a_trainer_takes_no_more_arguments():
    assert len(inspect.signature(Trainer.__init__).parameters) - 1 <= MOST_ARGUMENTS


def is_display(value: ast.expr | None) -> bool:
    """Return True for a tuple's pieces in a row, and for a sum of such tuples or a choice between them."""
    match value:
        case ast.BinOp(one, ast.Add(), other) | ast.IfExp(_, one, other):
            return is_display(one) and is_display(other)
    return isinstance(value, ast.Tuple)


def bound(node: ast.AST) -> list[tuple[ast.expr, ast.expr | None]]:
    """Return the targets that a node binds, each with its value."""
    match node:
        case ast.Assign([ast.Tuple(targets)], ast.Tuple(values)):
            return list(zip(targets, values, strict=False))
        case ast.Assign(targets, value):
            return [(target, value) for target in targets]
        case ast.AnnAssign(target, _, value) | ast.NamedExpr(target, value):
            return [(target, value)]
    return []


def unnamed_tuples(tree: ast.AST) -> set[str]:
    """Return the calls that unpack a tuple of the same function, whose pieces a reader cannot tell apart."""
    found = set()
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        nodes = list(ast.walk(function))
        tuples = {ast.unparse(target) for n in nodes for target, value in bound(n) if is_display(value)}
        for call in (n for n in nodes if isinstance(n, ast.Call)):
            starred = [ast.unparse(each.value) for each in call.args if isinstance(each, ast.Starred)]
            if tuples.intersection(starred):
                found.add(ast.unparse(call))
    return found


def test_no_call_unpacks_a_tuple_made_beside_it():
    assert {name: calls for name, tree in TREES.items() if (calls := unnamed_tuples(tree))} == {}


@pytest.mark.parametrize(
    "binding",
    [
        "given = a, b",
        "given: tuple[int, int] = (a, b)",
        "given = (a, b) + (c,)",
        "given = (a, b) if c else ()",
        "given, other = (a, b), c",
        "other(given := (a, b))",
    ],
)
def test_a_tuple_made_beside_a_call_is_found(binding):
    assert unnamed_tuples(ast.parse(f"def f():\n    {binding}\n    return g(c, *given)")) == {"g(c, *given)"}


@pytest.mark.parametrize(
    "source",
    [
        "def f(*given):\n    return g(*given)",
        "def f(words):\n    given = [*words, 'x']\n    return g(*given)",
        "def f(words):\n    given = tuple(words)\n    return g(*given)",
        "def f(words):\n    given = words + (1,)\n    return g(*given)",
        "def f():\n    given = a, b\n    return g(given)",
        "given = a, b\ndef f():\n    return g(*given)",
    ],
)
def test_a_sequence_may_be_unpacked(source):
    assert unnamed_tuples(ast.parse(source)) == set()


def test_a_name_of_a_class_has_one_meaning():
    """Whoever reads a type's name knows which one is meant; an inner class counts as well."""
    defined: defaultdict[str, list[str]] = defaultdict(list)
    for name, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                defined[node.name].append(name)
    assert {name: places for name, places in defined.items() if len(places) > 1} == {}
