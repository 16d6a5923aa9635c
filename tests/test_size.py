"""The package stays small: ceilings of what grows unseen. They move down, or by a decision (0058)."""

import ast
import importlib.util
import inspect
from collections import defaultdict
from pathlib import Path

from hybridpipe import Trainer

PACKAGE = Path(importlib.util.find_spec("hybridpipe").origin).parent
SOURCES = {str(path.relative_to(PACKAGE)): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
TREES = {name: ast.parse(source) for name, source in SOURCES.items()}
MOST_OF_A_FILE, MOST_OF_ALL = 400, 29_141  # lines of code
MOST_ARGUMENTS = 33  # of Trainer
MOST_TUPLES = 127  # calls with *name, whose arguments a reader cannot tell apart


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


def test_no_more_calls_pass_unnamed_tuples():
    calls = [node for tree in TREES.values() for node in ast.walk(tree) if isinstance(node, ast.Call)]
    starred = [each for call in calls for each in call.args if isinstance(each, ast.Starred)]
    assert sum(isinstance(each.value, ast.Name) for each in starred) <= MOST_TUPLES


def test_a_name_of_a_class_has_one_meaning():
    """Whoever reads a type's name knows which one is meant; an inner class counts as well."""
    defined: defaultdict[str, list[str]] = defaultdict(list)
    for name, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                defined[node.name].append(name)
    assert {name: places for name, places in defined.items() if len(places) > 1} == {}
