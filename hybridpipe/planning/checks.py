"""Checks of values at construction: one line that names the field, the value and what is allowed."""

import math
from collections.abc import Collection
from numbers import Integral
from typing import Any

# Limits of seconds, factors and divisors: beyond them products and quotients may overflow.
LARGEST, SMALLEST = 1e30, 1e-30
MAX_RANKS = 2**20  # beyond any machine; a slip in a file must not fill the memory with ranks
# Policies for a loss or gradient that is not finite; `Trainer` documents them.
ON_NONFINITE = ("stop", "skip", "ignore")
PRECISIONS = ("fp32", "bf16", "fp16", "bf16-params")  # of a microbatch; `Trainer` documents them
BACKENDS = ("horovod", "mpi", "torch")  # that sum gradients over replicas (`hybridpipe.collectives`)
NO_COMPRESSION = "none"
COMPRESSIONS = {NO_COMPRESSION: 1.0, "fp16": 0.5}  # the share of a gradient's bytes that a reduction moves
NO_PREDICTION = "off"
PREDICTIONS = (NO_PREDICTION, "spectrain", "xpipe")  # of weights (`hybridpipe.optim.prediction`)
GROUP_RULES = ("average", "elastic", "diloco")  # of groups (`hybridpipe.optim.centre`)
AUTO_SYNC = "auto"  # the default backend that is there, unless another was measured to be clearly faster


def plain(value: Any) -> Any:
    """Return a NumPy integer as Python's own; anything else unchanged."""
    return int(value) if isinstance(value, Integral) and not isinstance(value, int) else value


def integer(name: str, value: Any, least: int = -(2**63)) -> int:
    """Return a Python integer of at most 64 bits, from a Python or NumPy integer.

    Raises:
        ValueError: the value is no integer, or less than `least`.
    """
    what = "a 64-bit integer" if least < 0 else f"an integer >= {least}"
    if isinstance(value, bool) or not isinstance(plain(value), int) or not least <= value < 2**63:
        raise ValueError(f"{name} must be {what}, got {value!r}")
    return int(value)


def positive_int(name: str, value: int) -> None:
    """Raises ValueError unless `value` is an integer >= 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be an integer >= 1, got {value!r}")


def non_negative_int(name: str, value: int) -> None:
    """Raises ValueError unless `value` is an integer >= 0."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name} must be an integer >= 0, got {value!r}")


def non_negative(name: str, value: float) -> None:
    """Raises ValueError unless `value` is a finite number >= 0 and <= LARGEST."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{name} must be a finite number >= 0, got {value!r}")
    if value > LARGEST:
        raise ValueError(f"{name} must be a number <= {LARGEST}, got {value!r}")


def factor(name: str, value: float) -> None:
    """Raises ValueError unless `value` is a finite number >= SMALLEST and <= LARGEST."""
    positive(name, value)
    non_negative(name, value)


def positive(name: str, value: float) -> None:
    """Raises ValueError unless `value` is a finite number > 0 and >= SMALLEST."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{name} must be a finite number > 0, got {value!r}")
    if value < SMALLEST:
        raise ValueError(f"{name} must be a number >= {SMALLEST}, got {value!r}")


def one_of(name: str, value: object, allowed: Collection[object]) -> None:
    """Raises ValueError unless `value` is one of `allowed`."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(str, allowed))}, got {value!r}")
