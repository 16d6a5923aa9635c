"""Instructions: what one rank does, one after the other. The text form is also a file format.

Pure data. A schedule yields only Forward, Backward, AllReduce and Step; `add_communication` puts the
sends and receives around them, so that no schedule has to know its neighbours.

    F3 / B3     forward / backward of microbatch 3
    ra3 / sa3   receive / send the activations of microbatch 3
    rg3 / sg3   receive / send the gradients of microbatch 3
    all-reduce  the mean gradient over the stage's replicas
    step        the optimizer's update
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class _OnMicrobatch:
    microbatch: int
    symbol: ClassVar[str]

    def __str__(self) -> str:
        return f"{self.symbol}{self.microbatch}"


@dataclass(frozen=True, slots=True)
class _OnStage:
    symbol: ClassVar[str]

    def __str__(self) -> str:
        return self.symbol


class Forward(_OnMicrobatch):
    """Run the stage on one microbatch and stash what its backward needs."""

    __slots__ = ()
    symbol = "F"


class Backward(_OnMicrobatch):
    """Run the stage's backward on one microbatch; gradients add up in the parameters."""

    __slots__ = ()
    symbol = "B"


class ReceiveActivation(_OnMicrobatch):
    """Wait for the tensors that the stage before sends forward."""

    __slots__ = ()
    symbol = "ra"


class SendActivation(_OnMicrobatch):
    """Start sending the stage's outputs to the stage behind."""

    __slots__ = ()
    symbol = "sa"


class ReceiveGradient(_OnMicrobatch):
    """Wait for the gradients of the stage's outputs."""

    __slots__ = ()
    symbol = "rg"


class SendGradient(_OnMicrobatch):
    """Start sending the gradients of the stage's inputs to the stage before."""

    __slots__ = ()
    symbol = "sg"


class AllReduce(_OnStage):
    """Wait until the gradients are summed over the stage's replicas.

    It starts earlier: each bucket of gradients is reduced as soon as the last backward fills it.
    """

    __slots__ = ()
    symbol = "all-reduce"


class Step(_OnStage):
    """The optimizer updates the stage's weights."""

    __slots__ = ()
    symbol = "step"


Instruction = (
    Forward
    | Backward
    | ReceiveActivation
    | SendActivation
    | ReceiveGradient
    | SendGradient
    | AllReduce
    | Step
)
Program = tuple[Instruction, ...]

_ON_MICROBATCH: dict[str, type[_OnMicrobatch]] = {
    kind.symbol: kind
    for kind in (Forward, Backward, ReceiveActivation, SendActivation, ReceiveGradient, SendGradient)
}
_ON_STAGE: dict[str, type[_OnStage]] = {kind.symbol: kind for kind in (AllReduce, Step)}


def text(program: Iterable[Instruction]) -> str:
    """One line, for golden tests, logs and bug reports: "F0 F1 B0 B1 all-reduce step"."""
    return " ".join(map(str, program))


def parse(line: str) -> Program:
    """The inverse of `text`. Raises ValueError that names the word it does not know."""
    return tuple(_parse_word(word) for word in line.split())


def _parse_word(word: str) -> Instruction:
    if word in _ON_STAGE:
        return _ON_STAGE[word]()  # type: ignore[return-value]  # the tables hold the union's members
    match = re.fullmatch(r"([A-Za-z]+)(\d+)", word)
    if match is None or match[1] not in _ON_MICROBATCH:
        allowed = ", ".join([*(f"{symbol}<n>" for symbol in _ON_MICROBATCH), *_ON_STAGE])
        raise ValueError(f"unknown instruction {word!r}; allowed: {allowed}")
    return _ON_MICROBATCH[match[1]](int(match[2]))  # type: ignore[return-value]


def last_backward(program: Program) -> int | None:
    """Where the last backward stands, during which gradients become final; None where there is none."""
    return max((i for i, each in enumerate(program) if isinstance(each, Backward)), default=None)


def add_communication(program: Iterable[Instruction], stage: int, num_stages: int) -> Iterator[Instruction]:
    """Receives before, and sends after, each forward and backward that has a neighbour."""
    first, last = stage == 0, stage == num_stages - 1
    for instruction in program:
        match instruction:
            case Forward(m):
                if not first:
                    yield ReceiveActivation(m)
                yield instruction
                if not last:
                    yield SendActivation(m)
            case Backward(m):
                if not last:
                    yield ReceiveGradient(m)
                yield instruction
                if not first:
                    yield SendGradient(m)
            case _:
                yield instruction
