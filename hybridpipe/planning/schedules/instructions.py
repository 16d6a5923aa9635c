"""Instructions: the actions of one rank, in order, with a text form.

    F3 / B3     forward / backward of microbatch 3
    I3 / W3     the two halves of B3: gradients of the inputs / of the weights
    ra3 / sa3   receive / send the activations of microbatch 3
    rg3 / sg3   receive / send the gradients of microbatch 3
    jf3 / jb3   join the forward / backward that the stage's other replicas run, without a microbatch
    F3.1        the same on the rank's second stage, where it holds several
    all-reduce, reduce-scatter
                the mean gradient over the stage's replicas, whole or to each its share
    step        the optimizer's update
    all-gather  the updated weights from the stage's replicas

Pure data. Invariant: a schedule yields only computing instructions, AllReduce and Step. `add_communication`
adds sends and receives, so that no schedule has to know its neighbours, `add_sharding` what replicas
exchange that shard the update, and `add_joins` the passes of replicas that have no microbatch left.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, get_args


@dataclass(frozen=True, slots=True)
class _OnMicrobatch:
    microbatch: int
    chunk: int = 0  # which of the stages that the rank holds
    symbol: ClassVar[str]

    def __str__(self) -> str:
        return f"{self.symbol}{self.microbatch}" + (f".{self.chunk}" if self.chunk else "")


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


class BackwardInput(_OnMicrobatch):
    """Compute the gradients of the stage's inputs: the half of a backward that the stage before waits for."""

    __slots__ = ()
    symbol = "I"


class BackwardWeight(_OnMicrobatch):
    """Add the gradients of the weights to those of the parameters: the other half of a backward."""

    __slots__ = ()
    symbol = "W"


class JoinForward(_OnMicrobatch):
    """Run the experts that this rank holds in the others' forward, without tokens of its own.

    The microbatch is the one that the rank would have if the minibatch had a round more.
    """

    __slots__ = ()
    symbol = "jf"


class JoinBackward(_OnMicrobatch):
    """Run the backward of a `JoinForward`."""

    __slots__ = ()
    symbol = "jb"


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


@dataclass(frozen=True, slots=True)
class AllReduce(_OnStage):
    """Wait until the gradients are summed over the stage's replicas.

    It starts earlier: each bucket of gradients is reduced as soon as the last backward fills it.

    Args:
        completes: no further backward comes before the update; not in the text form.
    """

    completes: bool = field(default=True, compare=False)
    symbol: ClassVar[str] = "all-reduce"


@dataclass(frozen=True, slots=True)
class ReduceScatter(_OnStage):
    """Wait until each of the stage's replicas has the sum of its share of the gradients.

    It starts earlier, as `AllReduce` does.

    Args:
        completes: as of `AllReduce`.
    """

    completes: bool = field(default=True, compare=False)
    symbol: ClassVar[str] = "reduce-scatter"


class AllGather(_OnStage):
    """Wait until the weights are here that the stage's other replicas have updated."""

    __slots__ = ()
    symbol = "all-gather"


@dataclass(frozen=True, slots=True)
class Step(_OnStage):
    """The optimizer updates the stage's weights.

    Args:
        num_minibatches: number of minibatches whose gradients the update applies; not in the text form.
    """

    num_minibatches: int = field(default=1, compare=False)
    symbol: ClassVar[str] = "step"


class Load(_OnMicrobatch):
    """Take a microbatch's inputs, or its targets, from the data set.

    No program contains it. A measured timeline has it before each forward that needs them.
    """

    __slots__ = ()
    symbol = "load"


class Products(_OnStage):
    """Compute the weight gradients that backwards have deferred.

    No program contains it. A timeline has it before the all-reduce, where there were any.
    """

    __slots__ = ()
    symbol = "products"


Instruction = (
    Forward
    | Backward
    | BackwardInput
    | BackwardWeight
    | JoinForward
    | JoinBackward
    | ReceiveActivation
    | SendActivation
    | ReceiveGradient
    | SendGradient
    | AllReduce
    | ReduceScatter
    | Step
    | AllGather
)
Reduction = AllReduce | ReduceScatter
Program = tuple[Instruction, ...]


def text(program: Iterable[Instruction]) -> str:
    """Return one line, for golden tests, logs and bug reports, such as "F0 F1 B0 B1 all-reduce step"."""
    return " ".join(map(str, program))


def final_backwards(program: Program) -> frozenset[int]:
    """Return the positions of the last backward of each chunk before each reduction.

    Gradients become final in it, except for deferred products (`Plan.defers_wgrad`).
    """
    finals: set[int] = set()
    last: dict[int, int] = {}
    for i, instruction in enumerate(program):
        if isinstance(instruction, (Backward, BackwardWeight)):
            last[instruction.chunk] = i
        elif isinstance(instruction, Reduction):
            finals.update(last.values())
            last.clear()
    return frozenset(finals)


def parse(word: str) -> Instruction | Load | Products:
    """Return the instruction of a word of `text`, or of a timeline, such as "F3.1".

    Raises:
        ValueError: it is none.
    """
    found = re.fullmatch(r"(\D+?)(\d+)?(?:\.(\d+))?", word)
    kind = found and _KINDS.get(found[1])
    if not found or not kind or issubclass(kind, _OnMicrobatch) != bool(found[2]):
        raise ValueError(f"instruction must be such as F3, sa0 or step, got {word!r}")
    made: Instruction | Load | Products = kind(*(int(number) for number in found.groups()[1:] if number))
    return made


_KINDS: dict[str, Any] = {kind.symbol: kind for kind in (*get_args(Instruction), Load, Products)}


class ProgramPart(NamedTuple):
    """The instructions from one update to the next, the all-gather of the weights included.

    Args:
        range: their indices in the program.
        num_minibatches: number of minibatches in the update that ends the part; 0 where none does.
    """

    range: range
    num_minibatches: int


class RankProgram:
    """A program and its derived data, computed once for many runs.

    Args:
        instructions: the program.
    """

    def __init__(self, instructions: Program) -> None:
        self.instructions = instructions
        self.finals = final_backwards(instructions)
        self.parts = tuple(_parts(instructions))


def _parts(program: Program) -> Iterator[ProgramPart]:
    start = 0
    for i, instruction in enumerate(program):
        if isinstance(instruction, Step):
            end = i + 1 + (program[i + 1 : i + 2] == (AllGather(),))
            yield ProgramPart(range(start, end), instruction.num_minibatches)
            start = end
    if start < len(program):
        yield ProgramPart(range(start, len(program)), 0)


def without_update(program: Program) -> Program:
    """Return the program of a minibatch whose gradients stay, whole, for a later one to add to."""
    return tuple(each for each in program if not isinstance(each, Reduction | Step | AllGather))


def add_sharding(
    program: Iterable[Instruction], zero: int, scatters: bool, rounds: int
) -> Iterator[Instruction]:
    """Yield the program of a replica that shards the update with others (`StageSpec.zero`).

    Under 2 a reduction follows each backward, and a replica with fewer microbatches joins in the rest.

    Args:
        zero, scatters: of the rank's stage (`Plan.zero_of`, `Plan.scatters`).
        rounds: the most microbatches that a replica has of an update.
    """
    kind = ReduceScatter if scatters else AllReduce
    rounds = rounds if zero == 2 else 1
    num_reduced = 0
    for instruction in program:
        if isinstance(instruction, AllReduce):
            yield from (kind(done == rounds) for done in range(num_reduced + 1, rounds + 1))
            num_reduced = 0
            continue
        yield instruction
        if isinstance(instruction, Step):
            yield AllGather()
        elif zero == 2 and isinstance(instruction, (Backward, BackwardWeight)):
            num_reduced += 1
            yield kind(num_reduced == rounds)


def add_joins(program: Iterable[Instruction], num_microbatches: int) -> Iterator[Instruction]:
    """Yield the program of a replica that runs every pass together with the others of its stage.

    Args:
        program: for as many microbatches as the replica with most has; the last may be none of the minibatch.
        num_microbatches: of the minibatch.
    """
    for instruction in program:
        if not isinstance(instruction, _OnMicrobatch) or instruction.microbatch < num_microbatches:
            yield instruction
        elif isinstance(instruction, Forward):
            yield JoinForward(instruction.microbatch, instruction.chunk)
        elif not isinstance(instruction, BackwardWeight):  # a join computes those in its backward
            yield JoinBackward(instruction.microbatch, instruction.chunk)


def add_communication(
    program: Iterable[Instruction], before: Sequence[bool], behind: Sequence[bool]
) -> Iterator[Instruction]:
    """Yield the program with receives before, and sends after, each forward and backward with a neighbour.

    Args:
        before, behind: by chunk, True if the stage before, or the one behind, lies on another rank.
    """
    for instruction in program:
        if isinstance(instruction, Forward):  # with a `match`, making programs takes 1.3 times as long
            m, chunk = instruction.microbatch, instruction.chunk
            if before[chunk]:
                yield ReceiveActivation(m, chunk)
            yield instruction
            if behind[chunk]:
                yield SendActivation(m, chunk)
        elif isinstance(instruction, (Backward, BackwardInput)):
            m, chunk = instruction.microbatch, instruction.chunk
            if behind[chunk]:
                yield ReceiveGradient(m, chunk)
            yield instruction
            if before[chunk]:
                yield SendGradient(m, chunk)
        else:
            yield instruction
