"""Imports point one way: planning knows nobody, stage and runtime know planning, the trainer knows all."""

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(importlib.util.find_spec("hybridpipe").origin).parent
PLANNING = sorted(path.stem for path in (PACKAGE / "planning").glob("*.py") if path.stem != "__init__")
ENTRANCES = ("trainer", "Trainer", "cli", "config", "compare")


@pytest.mark.parametrize("module", ["hybridpipe", *(f"hybridpipe.planning.{name}" for name in PLANNING)])
def test_importing_loads_neither_torch_nor_mpi(module):
    probe = f"import sys, {module}; print({{'torch', 'mpi4py', 'horovod'}} & {{*sys.modules}})"
    assert subprocess.check_output([sys.executable, "-c", probe], text=True) == "set()\n"


def test_the_collector_rests_only_while_a_command_loads():
    """What torch's import makes is never garbage; a training makes some."""
    probe = (
        "import gc; from hybridpipe.cli.main import _loading\n"
        "with _loading(): print(gc.isenabled())\n"
        "print(gc.isenabled(), gc.get_freeze_count() > 0)"
    )
    assert subprocess.check_output([sys.executable, "-c", probe], text=True).split() == [
        "False",
        "True",
        "True",
    ]


def imported(source: str, package: str) -> set[str]:
    """Every name that an import may load, wherever it stands; `from a import b` loads a and perhaps a.b."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            names |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return names


def offences(folder: str, allowed) -> list[str]:
    return [
        f"{path.relative_to(PACKAGE)} imports {name}"
        for path in sorted((PACKAGE / folder).rglob("*.py"))
        for name in sorted(imported(path.read_text(), f"hybridpipe.{folder}"))
        if not allowed(name)
    ]


def pure(name: str) -> bool:
    top = name.split(".")[0]
    return top in sys.stdlib_module_names or top == "numpy" or f"{name}.".startswith("hybridpipe.planning.")


def below_the_trainer(name: str) -> bool:
    return not any(f"{name}.".startswith(f"hybridpipe.{entrance}.") for entrance in ENTRANCES)


def test_planning_is_pure():
    assert PLANNING and offences("planning", pure) == []


@pytest.mark.parametrize("folder", ["stage", "runtime"])
def test_stage_and_runtime_do_not_know_who_calls_them(folder):
    assert offences(folder, below_the_trainer) == []


@pytest.mark.parametrize(
    "line, is_pure, is_below",
    [
        ("import json", True, True),
        ("from numpy.typing import NDArray", True, True),
        ("from hybridpipe.planning import plan", True, True),
        ("from .plan import Plan", True, True),
        ("import torch", False, True),
        ("from hybridpipe.measure.layers import measure", False, True),
        ("from ..runtime import transport", False, True),
        ("def late(): from hybridpipe.training.trainer import Trainer", False, False),
        ("from hybridpipe import Trainer", False, False),
        ("from .. import cli", False, False),
        ("import hybridpipe.config", False, False),
    ],
)
def test_the_guard_sees(line, is_pure, is_below):
    names = imported(line, "hybridpipe.planning")
    assert (all(map(pure, names)), all(map(below_the_trainer, names))) == (is_pure, is_below)
