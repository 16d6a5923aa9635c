"""Validate: checks that programs obey the rules of their plan's schedule, whatever their origin.

Pure. Known here are the rules; of the generators only `in_flight_per_stage` and `versions`. The rules:

- each microbatch once a stage, on the plan's rank, forward before backward; a backward whole or split
- a receive before its use, a send after its source, and an order without deadlock
- synchronously: one update, at the end. pipedream: one a round of the stage's replicas. pipedream-2bw:
  one a minibatch. Each after exactly its backwards, and where there are replicas after one reduction
- replicas that shard the update (`StageSpec.zero`): the plan's kind of reduction, under 2 after each
  backward and equally often on all of them, and the weights gathered after the update. Under 2 a backward may
  wait for those of its round, so that few gradients are in flight
- replicas that split experts (`StageSpec.experts`) run every pass together: all have the same passes in the
  same order, and one that has no microbatch left joins
- pipedream: a forward uses the newest weights (SOSP 2019, section 3.3); with vertical sync the newest that
  contain no minibatch which the input stage's do not. pipedream-2bw: those of the minibatch before, among the
  last two (ICML 2021, section 3.1)
- no stage stashes more microbatches than its memory is counted for
"""

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping
from itertools import pairwise, zip_longest
from typing import NoReturn

from hybridpipe.planning.plan import Place, Plan
from hybridpipe.planning.schedules.generators import (
    UNLIMITED,
    ceil_div,
    in_flight_per_stage,
    programs,
    versions,
)
from hybridpipe.planning.schedules.instructions import (
    AllGather,
    AllReduce,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Instruction,
    JoinBackward,
    JoinForward,
    Program,
    ReceiveActivation,
    ReceiveGradient,
    ReduceScatter,
    Reduction,
    SendActivation,
    SendGradient,
    Step,
)

OnMicrobatch = (
    Forward
    | Backward
    | BackwardInput
    | BackwardWeight
    | ReceiveActivation
    | SendActivation
    | ReceiveGradient
    | SendGradient
)
FROM_BEHIND = (ReceiveGradient, SendActivation)  # they need a stage behind; these one before:
FROM_BEFORE = (ReceiveActivation, SendGradient)
EXCHANGING = (
    Forward,
    Backward,
    BackwardInput,
    JoinForward,
    JoinBackward,
)  # passes in which replicas may exchange


MOST_INSTRUCTIONS = 2**13  # of a plan's check, which takes 0.1 s


class InvalidProgram(ValueError):
    """A program breaks a rule; one line names the rank, the instruction and the rule."""


def validate_plan(plan: Plan) -> None:
    """Check the programs of a plan, over a part of its minibatch where that is very long.

    Raises:
        InvalidProgram: the plan cannot be run, or a generator has a fault.
    """
    most = max(1, MOST_INSTRUCTIONS // (6 * plan.num_stages))  # forward, backward, two messages each way
    filled = 2 * plan.replicas[0] * in_flight_per_stage(plan, UNLIMITED)[0]
    wanted = filled if plan.is_asynchronous else plan.num_microbatches
    whole = plan.num_microbatches if plan.traits.versions == "two" else 1
    count = ceil_div(min(wanted, most), whole) * whole
    if count * 6 * plan.num_stages <= 2 * MOST_INSTRUCTIONS:
        validate(plan, programs(plan, count), count)


def validate(
    plan: Plan,
    programs: Mapping[int, Program],
    num_microbatches: int | None = None,
    *,
    synchronous_sends: bool = False,
) -> None:
    """Check programs against the rules above.

    Args:
        programs: one for each rank of the plan.
        num_microbatches: the number that the programs are for; as in `generators.programs`.
        synchronous_sends: also require that nothing waits for ever if a send lasts until its message was
            received (`MPI_Ssend`). The engine does not need this.

    Raises:
        InvalidProgram: the first rule found broken.
    """
    count = plan.num_microbatches if num_microbatches is None else num_microbatches
    if set(programs) != set(plan.ranks):
        raise InvalidProgram(
            f"programs must be those of the ranks {sorted(plan.ranks)}, got {sorted(programs)}"
        )
    _check_shards(plan, programs)
    plan, programs = (leaders := plan.of_leaders()), {rank: programs[rank] for rank in leaders.ranks}
    allowed = in_flight_per_stage(plan, count)
    _check_together(plan, programs)
    for rank, program in programs.items():
        place = plan.place(rank)
        assert place is not None
        _RankCheck(plan, rank, place, count, allowed).check(program)
    _check_progress(
        plan, {rank: _sending_late(plan, rank, each) for rank, each in programs.items()}, synchronous_sends
    )


def _check_shards(plan: Plan, programs: Mapping[int, Program]) -> None:
    """Raise InvalidProgram unless all shards of a replica have one program."""
    for stage in plan.stages[: plan.num_groups]:
        for index, rank in enumerate(stage.ranks):
            leader = stage.leaders[index // stage.tensor]
            if programs[rank] != programs[leader]:
                raise InvalidProgram(f"rank {rank} must run the program of rank {leader}, whose shard it is")


def _check_together(plan: Plan, programs: Mapping[int, Program]) -> None:
    """Raise InvalidProgram unless replicas that run together have the same passes in the same order."""
    for s, stage in enumerate(plan.stages):
        for index, rank in enumerate(stage.ranks):
            first = stage.ranks[index - index % plan.together(s)]
            each = (_passes(programs[member], plan.replicas[s]) for member in (first, rank))
            for one, other in zip_longest(*each) if rank != first else ():
                if one != other:
                    raise InvalidProgram(
                        f"rank {rank} (stage {s}): its passes must be those of rank {first}, with which it "
                        f"runs together: {_words(other)} stands where {_words(one)} should"
                    )


_Pass = tuple[str, int]


def _passes(program: Program, replicas: int) -> Iterator[_Pass]:
    """Yield the passes in which replicas may exchange, each with its round."""
    for each in program:
        if isinstance(each, EXCHANGING):
            is_forward = isinstance(each, Forward | JoinForward)
            yield "forward" if is_forward else "backward", each.microbatch // replicas


def _words(found: _Pass | None) -> str:
    return "nothing" if found is None else f"the {found[0]} of round {found[1]}"


def _sending_late(plan: Plan, rank: int, program: Program) -> Program:
    """Return the program with each gradient sent after the reduction behind it, where backwards may wait."""
    place = plan.place(rank)
    if place is None or plan.zero_of(place.stage) < 2:
        return program
    late = list(program)
    for i, (one, other) in enumerate(pairwise(program)):
        if isinstance(one, SendGradient) and isinstance(other, Reduction):
            late[i : i + 2] = other, one
    return tuple(late)


class _RankCheck:
    """One rank's program, read from its start."""

    def __init__(self, plan: Plan, rank: int, place: Place, count: int, allowed: tuple[int, ...]) -> None:
        self.plan, self.rank, self.place, self.count, self.allowed = plan, rank, place, count, allowed
        self.stages = plan.held_stages(place)
        self.mine = plan.microbatches_of(place, count)
        self.versions = versions(plan, place.stage) if plan.is_asynchronous else None
        self.belonging = Counter(self.update_of(m) for m in self.mine for _ in self.stages)
        self.num_updates = self.update_of(count - 1) + 1
        self.zero = plan.zero_of(place.stage)
        self.reduction = ReduceScatter if plan.scatters(place.stage) else AllReduce
        self.num_reductions = ceil_div(count, plan.replicas[place.stage]) if self.zero == 2 else 1
        self.most = plan.room  # of all chunks; 0: each has its own
        self.at = ""
        self.seen: set[Instruction] = set()
        self.stashed = [0] * len(self.stages)
        self.updates = 0
        self.gathers = 0
        self.returned = 0  # backwards since the last update
        self.reduced = 0  # reductions since the last update

    def check(self, program: Program) -> None:
        for i, instruction in enumerate(program):
            self.at = f"instruction {i}, {instruction}"
            match instruction:
                case AllReduce() | ReduceScatter():
                    self.reduce(instruction)
                case Step():
                    self.step()
                case AllGather():
                    self.gather()
                case JoinForward() | JoinBackward():
                    self.join(instruction)
                case _:
                    self.on_microbatch(instruction)
        self.at = "end of the program"
        if self.updates < self.num_updates or self.reduced:
            self.fail(f"there must be {self.num_updates} updates, got {self.updates}")
        if self.zero and self.gathers < self.updates:
            self.fail("the updated weights must be gathered")
        self.check_complete()

    def fail(self, rule: str) -> NoReturn:
        stages = ", ".join(map(str, self.stages))
        raise InvalidProgram(f"rank {self.rank} (stage {stages}), {self.at}: {rule}")

    def update_of(self, microbatch: int) -> int:
        """Return the update that a microbatch's gradients belong to."""
        if not self.plan.is_asynchronous:
            return 0
        whole = self.plan.traits.whole_minibatch
        return microbatch // (self.plan.replicas[self.place.stage] if whole else self.plan.num_microbatches)

    # Updates

    def reduce(self, instruction: Reduction) -> None:
        if type(instruction) is not self.reduction:
            self.fail(f"the stage's reduction is {self.reduction.symbol}")
        if self.reduced == self.num_reductions:
            each = "one all-reduce" if self.num_reductions == 1 else f"{self.num_reductions} reductions"
            self.fail(f"there must be {each} an update")
        if self.zero < 2:
            self.check_returned()
        elif self.returned == self.reduced < self.belonging[self.updates]:
            self.fail("a backward must come before it")
        self.reduced += 1

    def step(self) -> None:
        if self.reduced < self.num_reductions and self.plan.replicas[self.place.stage] > 1:
            self.fail("an all-reduce must come before the update")
        self.check_returned()
        self.updates += 1
        self.returned = self.reduced = 0

    def gather(self) -> None:
        if not self.zero or self.gathers == self.updates:
            self.fail("an update of shares must come before it")
        self.gathers += 1

    def check_returned(self) -> None:
        if self.updates >= self.num_updates:
            self.fail(f"there must be {self.num_updates} updates")
        if self.returned < self.belonging[self.updates]:
            due = self.belonging[self.updates]
            self.fail(f"{due} backwards belong to update {self.updates}, got {self.returned} before it")

    # Microbatches

    def join(self, instruction: JoinForward | JoinBackward) -> None:
        if self.plan.together(self.place.stage) == 1:
            self.fail("the stage's replicas do not run together")
        if instruction.chunk >= len(self.stages):
            self.fail(f"the rank holds {len(self.stages)} stages")
        if instruction.microbatch < self.count:
            self.fail("the microbatch has a pass of its own")
        if instruction.microbatch % self.plan.replicas[self.place.stage] != self.place.replica:
            self.fail("the microbatch would belong to another rank")
        if isinstance(instruction, JoinBackward):
            self.check_seen(JoinForward(instruction.microbatch, instruction.chunk))
        self.seen.add(instruction)

    def on_microbatch(self, instruction: OnMicrobatch) -> None:
        m, chunk = instruction.microbatch, instruction.chunk
        if chunk >= len(self.stages):
            self.fail(f"the rank holds {len(self.stages)} stages")
        if m >= self.count:
            self.fail(f"there are {self.count} microbatches")
        if m not in self.mine:
            self.fail(f"the microbatch belongs to rank {self.plan.rank_of(self.stages[chunk], m)}")
        if instruction in self.seen:
            self.fail("it stands there twice")
        self.check_order(instruction, self.stages[chunk])
        self.seen.add(instruction)
        if isinstance(instruction, Forward):
            self.forward(m, chunk)
        elif isinstance(instruction, Backward | BackwardWeight):
            self.backward(m, chunk)
        if self.updates == self.num_updates:
            self.fail("the last update must come after it")

    def check_order(self, instruction: OnMicrobatch, stage: int) -> None:
        m, chunk = instruction.microbatch, instruction.chunk
        if isinstance(instruction, FROM_BEFORE) and not self.plan.sends(stage - 1):
            self.fail(f"stage {stage} has no neighbour there")
        if isinstance(instruction, FROM_BEHIND) and not self.plan.sends(stage):
            self.fail(f"stage {stage} has no neighbour there")
        halves = _backwards(m, chunk)
        match instruction:
            case Forward() if stage > 0:
                from_here = Forward(m, self.plan.chunk_of(stage - 1))
                is_sent = self.plan.sends(stage - 1)
                self.check_seen(ReceiveActivation(m, chunk) if is_sent else from_here)
            case SendActivation():
                self.check_seen(Forward(m, chunk))
            case Backward() | BackwardInput():
                if self.seen.intersection(halves):
                    self.fail("the backward must be done either whole or in halves")
                self.check_seen(Forward(m, chunk))
                if self.plan.sends(stage):
                    self.check_seen(ReceiveGradient(m, chunk))
                elif stage < self.plan.num_stages - 1:
                    self.check_seen(*_backwards(m, self.plan.chunk_of(stage + 1)))
            case BackwardWeight():
                self.check_seen(BackwardInput(m, chunk))
            case SendGradient() if not self.seen.intersection(halves):
                self.fail("its backward must come before it")

    def check_seen(self, *needed: Instruction) -> None:
        """Check that one of these came before."""
        if not self.seen.intersection(needed):
            self.fail(f"{needed[0]} must come before it")

    def forward(self, m: int, chunk: int) -> None:
        self.stashed[chunk] += 1
        allowed = self.allowed[self.stages[chunk]]
        if self.stashed[chunk] > allowed:
            self.fail(f"at most {allowed} microbatches may be stashed, this is one more")
        if 0 < self.most < sum(self.stashed):
            self.fail(f"at most {self.most} microbatches of all chunks may be stashed, this is one more")
        if self.versions is not None:
            self.check_version(m, self.versions(m))

    def backward(self, m: int, chunk: int) -> None:
        """Check a backward that computes gradients of the weights."""
        self.stashed[chunk] -= 1
        if self.update_of(m) != self.updates:
            self.fail(f"it belongs to update {self.update_of(m)}, and {self.updates} updates are before it")
        if self.zero < 2 and self.reduced:
            self.fail("it must come before the all-reduce of its update")
        if self.zero == 2 and self.returned > self.reduced:
            self.fail("the gradients before it must be reduced first")
        self.returned += 1
        if self.plan.traits.versions == "two" and self.versions is not None:
            self.check_version(m, self.versions(m))

    def check_version(self, m: int, version: int) -> None:
        if version > self.updates:
            self.fail(f"it uses version {version}, and {self.updates} updates are before it")
        if self.plan.traits.versions == "two":
            minibatch = self.update_of(m)
            if version != max(0, minibatch - 1):
                self.fail(f"minibatch {minibatch} must use the version of the one before, not {version}")
            if version < self.updates - 1:
                self.fail(f"it uses version {version}, and only the last two of {self.updates} are kept")
            return
        if self.plan.vertical_sync and self.place.stage:
            seen = versions(self.plan, 0)(m) * self.plan.replicas[0]
            replicas = self.plan.replicas[self.place.stage]
            if not version * replicas <= seen < (version + 1) * replicas:
                self.fail(f"version {version} is not the newest within {seen} minibatches, the input stage's")
        elif version != self.updates:
            self.fail(f"it must use the newest version, {self.updates}, not {version}")

    def check_complete(self) -> None:
        for chunk, stage in enumerate(self.stages):
            for m in self.mine:
                expected: list[Instruction] = [Forward(m, chunk)]
                if self.plan.sends(stage - 1):
                    expected += [ReceiveActivation(m, chunk), SendGradient(m, chunk)]
                if self.plan.sends(stage):
                    expected += [SendActivation(m, chunk), ReceiveGradient(m, chunk)]
                if Backward(m, chunk) not in self.seen:
                    expected += [BackwardInput(m, chunk), BackwardWeight(m, chunk)]
                for instruction in expected:
                    if instruction not in self.seen:
                        self.fail(f"{instruction} is missing")


def _backwards(m: int, chunk: int) -> tuple[Instruction, ...]:
    """Return the instructions after which the gradients of a chunk's inputs are there."""
    return Backward(m, chunk), BackwardInput(m, chunk)


_Happening = tuple[str | int, ...]


def _check_progress(plan: Plan, programs: Mapping[int, Program], synchronous: bool) -> None:
    """Run all programs without times, each as far as it gets. Raises InvalidProgram on deadlock."""
    position = dict.fromkeys(programs, 0)
    num_joined: Counter[_Happening] = Counter()
    entered: Counter[_Happening] = Counter()
    happened: set[_Happening] = set()
    waiting: defaultdict[_Happening, list[int]] = defaultdict(list)
    ready = deque(programs)
    stages = {rank: plan.held_stages(Place(s, 0)) for s, rank in _first_stages(plan)}
    neighbours = {rank: _neighbours(plan, rank) for rank in programs}

    def happen(what: _Happening) -> None:
        happened.add(what)
        ready.extend(waiting.pop(what, ()))

    def arrive(rank: int, instruction: Instruction) -> _Happening | None:
        """Note what the instruction makes happen; return the happening that the rank waits for."""
        stage, exchanges = stages[rank][0], isinstance(instruction, EXCHANGING)
        size = plan.together(stage) if exchanges else plan.replicas[stage]
        match instruction:
            case _ if size > 1 and isinstance(
                instruction, (*EXCHANGING, AllReduce, ReduceScatter, AllGather)
            ):
                group = neighbours[rank] if exchanges else (stage,)
                num_joined[rank, *group] += 1
                joined = "joined", *group, num_joined[rank, *group]
                entered[joined] += 1
                if entered[joined] == size:
                    happen(joined)
                return joined
            case SendActivation(m, chunk) | SendGradient(m, chunk):
                behind = stages[rank][chunk] + isinstance(instruction, SendActivation)
                happen((instruction.symbol[1], m, behind))
                return ("wanted", instruction.symbol[1], m, behind) if synchronous else None
            case ReceiveActivation(m, chunk) | ReceiveGradient(m, chunk):
                behind = stages[rank][chunk] + isinstance(instruction, ReceiveGradient)
                happen(("wanted", instruction.symbol[1], m, behind))
                return instruction.symbol[1], m, behind
        return None

    while ready:
        rank = ready.popleft()
        program = programs[rank]
        while position[rank] < len(program):
            awaited = arrive(rank, program[position[rank]])
            position[rank] += 1
            if awaited is not None and awaited not in happened:
                waiting[awaited].append(rank)
                break
    stuck = sorted(rank for ranks in waiting.values() for rank in ranks)
    if stuck:
        raise InvalidProgram(
            "nothing can advance: "
            + "; ".join(
                f"rank {rank} (stage {', '.join(map(str, stages[rank]))}) waits at instruction "
                f"{position[rank] - 1}, {programs[rank][position[rank] - 1]}"
                for rank in stuck
            )
        )


def _neighbours(plan: Plan, rank: int) -> _Happening:
    """Return the stage of a rank, and its group among the replicas that run every pass together."""
    place = plan.place(rank)
    assert place is not None
    return place.stage, place.replica // plan.together(place.stage)


def _first_stages(plan: Plan) -> list[tuple[int, int]]:
    """Return (first stage, rank) of all ranks."""
    return [(s, rank) for s, stage in enumerate(plan.stages[: plan.num_groups]) for rank in stage.ranks]
