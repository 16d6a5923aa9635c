"""Commands on the pages, checked without running them: programs, options, files and variables that they name.

Knows the parser of hybridpipe and the scripts in launch/. Invariant: a command is followed to the program
that it starts in the end, through launchers.
"""

import re
import shlex
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path

from hybridpipe.cli import main
from tests.guide.blocks import ROOT

Words = Sequence[str]
ASSIGNED = re.compile(r"(\w+)=(.*)", re.DOTALL)
OF_OTHERS = ("OMPI_MCA_", "PRTE_MCA_")  # variables of other programs


class Wrong(AssertionError):
    """A command does not say what the program understands."""


def check(given: Words) -> None:
    """Check the words of a command. Raises Wrong."""
    rest = list(given[1:] if given[:1] == ["export"] else given)
    while rest and (assigned := ASSIGNED.fullmatch(rest[0])):
        _check_variable(assigned[1])
        rest.pop(0)
    if rest:
        program = rest[0].removeprefix(".venv/bin/")
        if program not in PROGRAMS:
            raise Wrong(f"no test knows the program {program}")
        PROGRAMS[program](rest[1:])


def _check_variable(name: str) -> None:
    if name.startswith(OF_OTHERS):
        return
    sources = [*(ROOT / "hybridpipe").rglob("*.py"), *(ROOT / "hybridpipe").rglob("*.sh"), *_scripts()]
    if not any(re.search(rf"\b{name}\b", path.read_text()) for path in sources):
        raise Wrong(f"nothing reads the variable {name}")


def _scripts() -> list[Path]:
    return [path for path in (ROOT / "launch").iterdir() if path.is_file()]


def _hybridpipe(given: Words) -> None:
    try:
        options = main._parser().parse_args(given)
    except SystemExit as ended:
        raise Wrong(f"hybridpipe {shlex.join(given)} is refused (see stderr)") from ended
    behind = getattr(options, "command", None)
    if behind is not None:
        behind = behind[1:] if behind[:1] == ["--"] else behind
        check(["hybridpipe", *behind] if behind[:1] == ["train"] else behind)


def _python(given: Words) -> None:
    match list(given):
        case ["-m", "hybridpipe", *rest]:
            _hybridpipe(rest)
        case ["-m", "hybridpipe.launch.mpirun", ranks, "--", *rest] if ranks.isdigit():
            check(rest)
        case [script, *_] if script == "train.py" or (ROOT / script).is_file():
            pass
        case _:
            raise Wrong(f"python {shlex.join(given)}: no such program")


def _script_of_launch(name: str) -> Callable[[Words], None]:
    """A check of options: the script must name them."""

    def checked(given: Words) -> None:
        text = "".join(
            path.read_text()
            for path in (
                ROOT / name,
                ROOT / "hybridpipe/install/setup.sh",
                ROOT / "hybridpipe/install/bundle.py",
            )
        )
        for option in (word for word in given if word.startswith("-")):
            if not re.search(rf"{option}(?![\w-])", text):
                raise Wrong(f"{name} has no option {option}")

    return checked


def _ranks_and_command(given: Words) -> None:
    ranks, *rest = given
    if not ranks.isdigit():
        raise Wrong(f"the number of ranks comes first, got {ranks}")
    check(rest[1:] if rest[:1] == ["--"] else ["hybridpipe", "train", *rest])


def _batch_script(given: Words) -> None:
    check(given[1:] if given[:1] == ["--"] else ["hybridpipe", "train", *given])


def _launcher(given: Words) -> None:
    """Of another launcher: short options have a value behind them, long ones have it behind =."""
    rest = list(given)
    while rest and rest[0].startswith("-"):
        del rest[: 1 if rest[0].startswith("--") else 2]
    check(rest)


def _apptainer(given: Words) -> None:
    """Of an image: long options, the image, and the command inside."""
    action, *rest = given
    while rest and rest[0].startswith("--"):
        rest.pop(0)
    if action != "exec" or not rest[0].endswith(".sif"):
        raise Wrong(f"apptainer {shlex.join(given)}: names no image")
    check(rest[1:])


def _pip(given: Words) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for word in given:
        for extra in re.findall(r"\[(.*)\]$", word):
            if not {*extra.split(",")} <= extras.keys():
                raise Wrong(f"pyproject.toml has no extra {extra}")


PROGRAMS: dict[str, Callable[[Words], None]] = {
    "hybridpipe": _hybridpipe,
    "python": _python,
    "launch/mpirun.sh": _ranks_and_command,
    "launch/horovodrun.sh": _ranks_and_command,
    "launch/slurm.sbatch": _batch_script,
    **{name: _script_of_launch(name) for name in ("launch/setup", "launch/bundle", "launch/test")},
    "launch/quickstart": lambda given: _hybridpipe(
        ["compare", "examples/digits.toml", "--ranks", "4", *given]
    ),
    "mpirun": _launcher,
    "srun": _launcher,
    "sbatch": _launcher,
    "env": check,
    "apptainer": _apptainer,
    "printenv": lambda given: None,
    "pip": _pip,
}
