"""Errors of the user, reported in one line with place, value and allowed values."""

from collections.abc import Iterable
from difflib import get_close_matches

_LONGEST_LIST = 12  # names; a longer list does not fit into one line


class UserError(ValueError):
    """Mistake in a file, a configuration or an argument; its text is one line, and commands exit with 2."""

    exit_code = 2
    step: int | None = None  # the training's step, if known


class NotSaved(UserError):
    """Failure to write a checkpoint. It is reported like a mistake, but a restart may succeed."""

    exit_code = 1

    def __init__(self, what: str, step: int | None = None) -> None:
        super().__init__(what)
        self.step = step


def suggest(name: str, allowed: Iterable[str]) -> str:
    """Hint for a wrong name, or an empty string: " (did you mean 'stop'? allowed: start, stop)"."""
    names = list(allowed)
    hints = [f"did you mean {close!r}?" for close in get_close_matches(name, names, n=1)]
    if 0 < len(names) <= _LONGEST_LIST:
        hints.append(f"allowed: {', '.join(names)}")
    return f" ({' '.join(hints)})" if hints else ""


def shown(value: object) -> str:
    """Text of a value as Python writes it, cut to 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
