"""How the user's mistakes are told: in one line that says where, what is there and what is allowed."""

from collections.abc import Iterable
from difflib import get_close_matches

TRAINING = "pip install 'hybridpipe[mpi]' && hybridpipe setup"
REMEDIES = {  # by the name of a ModuleNotFoundError: the command that installs the package
    **dict.fromkeys(("torch", "mpi4py", "safetensors", "tqdm"), TRAINING),
    **dict.fromkeys(("pydantic", "tabulate"), "pip install numpy pydantic tabulate"),
    "an MPI library": f"{TRAINING} (or load one: module load openmpi)",
    "scikit-learn": "pip install 'hybridpipe[examples]'",
}
_LONGEST_LIST = 12  # names; a longer list helps nobody in one line


class UserError(ValueError):
    """A mistake in a file, a configuration or an argument; its text is one line, commands exit with 2."""

    exit_code = 2
    step: int | None = None  # of the training, where it is known


class NotSaved(UserError):
    """A checkpoint could not be written. Told as a mistake is, but another attempt may go better."""

    exit_code = 1

    def __init__(self, what: str, step: int | None = None) -> None:
        super().__init__(what)
        self.step = step


def suggest(name: str, allowed: Iterable[str]) -> str:
    """What the user may have meant by `name`: " (did you mean 'stop'? allowed: start, stop)", or nothing."""
    names = list(allowed)
    hints = [f"did you mean {close!r}?" for close in get_close_matches(name, names, n=1)]
    if 0 < len(names) <= _LONGEST_LIST:
        hints.append(f"allowed: {', '.join(names)}")
    return f" ({' '.join(hints)})" if hints else ""


def shown(value: object) -> str:
    """The value as Python writes it, cut to what a line can bear."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
