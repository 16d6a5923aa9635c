"""Imports point one way: down this list, and planning knows nobody."""

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(importlib.util.find_spec("hybridpipe").origin).parent
ORDER = [
    "cli",
    "callbacks",
    "run_folder",
    "training",
    "spark",
    "launch",
    "install",
    "checkpoint",
    "measure",
    "engine",
    "optim",
    "collectives",
    "data",
    "health",
    "comm",
    "stage",
    "report",
    "model",
    "device",
    "config",
    "files",
    "torch_private",
    "environment",
    "types",
    "notices",
    "errors",
    "version",
    "planning",
]
SHIMS = {"hybridpipe.__init__", "hybridpipe.__main__"}  # of public names only


def module_name(path: Path) -> str:
    return ".".join(["hybridpipe", *path.relative_to(PACKAGE).with_suffix("").parts])


SOURCES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
PLANNING = [name.removesuffix(".__init__") for name in SOURCES if name.startswith("hybridpipe.planning.")]


def test_importing_loads_neither_torch_nor_mpi():
    """One after the other in one process: the first that loads them is named, and those after it."""
    probe = (
        "import importlib, sys\n"
        "for module in sys.argv[1:]:\n"
        "    importlib.import_module(module)\n"
        "    if {'torch', 'mpi4py', 'horovod'} & {*sys.modules}: print(module)"
    )
    modules = ["hybridpipe", *PLANNING]
    assert subprocess.check_output([sys.executable, "-c", probe, *modules], text=True) == ""


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


def level(name: str) -> int | None:
    """Where a name of the package stands in the order; None for names of others."""
    package, *rest = name.split(".")
    if package != "hybridpipe":
        return None
    return ORDER.index(rest[0]) if rest and rest[0] in ORDER else -1


def offences(name: str, source: str) -> list[str]:
    """The imports of a module that point upward, or from planning to anything but numpy and Python's own."""
    found = []
    for each in sorted(imported(source, name.rpartition(".")[0])):
        to = level(each)
        is_pure = each.split(".")[0] in (*sys.stdlib_module_names, "numpy") or to == ORDER.index("planning")
        upward = to is not None and each != "hybridpipe" and to < level(name)
        if upward or (name.startswith("hybridpipe.planning.") and not is_pure):
            found.append(f"{name} imports {each}")
    return found


@pytest.mark.parametrize("name", sorted(SOURCES.keys() - SHIMS))
def test_imports_point_downward(name):
    assert level(name) >= 0, f"{name} has no place in the order"
    assert offences(name, SOURCES[name].read_text()) == []


def test_few_modules_stand_at_the_top():
    assert len([name for name in SOURCES if name.count(".") == 1]) <= 10


@pytest.mark.parametrize(
    "of, line, is_offence",
    [
        ("planning.plan", "import json", False),
        ("planning.plan", "from numpy.typing import NDArray", False),
        ("planning.plan", "from hybridpipe.planning import checks", False),
        ("planning.plan", "from .checks import plain", False),
        ("planning.plan", "import torch", True),
        ("planning.plan", "from hybridpipe.errors import UserError", True),
        ("stage.stage", "import torch", False),
        ("stage.stage", "from hybridpipe.model import rng", False),
        ("stage.stage", "from hybridpipe.measure.layers import measure", True),
        ("stage.stage", "from ..comm import transport", True),
        ("stage.stage", "def late(): from hybridpipe.training.trainer import Trainer", True),
        ("stage.stage", "from hybridpipe import Trainer", True),
        ("stage.stage", "from .. import cli", True),
        ("stage.stage", "import hybridpipe.config", False),
        ("training.trainer", "import hybridpipe.cli", True),
        ("training.trainer", "from hybridpipe.launch import mpirun", False),
    ],
)
def test_the_guard_sees(of, line, is_offence):
    assert bool(offences(f"hybridpipe.{of}", line)) == is_offence


PRIVATE = re.compile(r"\btorch(\.\w+)*\._[A-Za-z]\w*|\bfrom torch[\w.]* import _")
# torch._dynamo, to have it before a measurement; a name in torch's own pickles
ELSEWHERE = {"cli/main.py": 1, "measure/memory.py": 1, "checkpoint/description.py": 1}


def test_what_torch_keeps_private_is_named_in_one_file():
    found = {}
    for path in PACKAGE.rglob("*.py"):
        code = re.sub(r"#.*", "", path.read_text())
        if path.name != "torch_private.py" and (count := len(PRIVATE.findall(code))):
            found[str(path.relative_to(PACKAGE))] = count
    assert found == ELSEWHERE


def test_no_test_imports_a_program():
    """A program that jobs run may change the package: one set how large a weight gradient is batched.

    A test imported it, and those after it in the same process failed.
    """
    tests = Path(__file__).parent
    found = [
        str(path.relative_to(tests))
        for path in tests.rglob("*.py")
        if "programs" not in path.parts
        and any(each.startswith("tests.mpi.programs") for each in imported(path.read_text(), "tests"))
    ]
    assert found == []
