"""Planner: from the trainer's argument `plan` to the plan that runs, and the microbatch size. Collective.

A plan by name is made from the first minibatch: the model is measured, the machines are probed, rank 0
searches. A given plan is checked at once, and measured only for a prediction.
"""

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import Tensor, nn

from hybridpipe.collectives.backends import Usable, suited, usable
from hybridpipe.comm.communicators import this_host
from hybridpipe.comm.idle import measure_together
from hybridpipe.comm.mpi import MPI
from hybridpipe.comm.progress_thread import needs_progress_thread
from hybridpipe.comm.training_group import TrainingGroup
from hybridpipe.config.options import Options, PlanOptions
from hybridpipe.data.batches import microbatch_size_of, parts_of
from hybridpipe.data.stream import Minibatch
from hybridpipe.engine import consistency
from hybridpipe.engine.splitting import NOTHING_TO_SPLIT, Splittable
from hybridpipe.environment import allocator
from hybridpipe.environment.memory_limits import RankMemory, bytes_for_stages
from hybridpipe.errors import UserError, told
from hybridpipe.files import read_cluster
from hybridpipe.health import failure, out_of_memory
from hybridpipe.measure.layers import Rehearsal
from hybridpipe.measure.memory import memory_of_ranks
from hybridpipe.model.deferred_init.deferred import Numbers
from hybridpipe.model.experts import Experts, experts_of, split_by
from hybridpipe.model.layers import Layers, known_layers, layers_of
from hybridpipe.model.sync_batchnorm import check_has_norms, synchronised
from hybridpipe.model.tensor_plan import SplitModule, called_whole, parts_by, split_modules_of
from hybridpipe.notices import notices
from hybridpipe.optim.update import UpdateRule
from hybridpipe.planning.checks import AUTO_SYNC
from hybridpipe.planning.cluster import Cluster
from hybridpipe.planning.plan import Plan
from hybridpipe.planning.profile import ModelProfile
from hybridpipe.planning.quantities import memory_bytes
from hybridpipe.planning.request import AUTO
from hybridpipe.planning.schedules.generators import ceil_div
from hybridpipe.planning.schedules.validate import validate_plan
from hybridpipe.planning.search.search import NoPlanFits
from hybridpipe.report.memory import least_left, misfit
from hybridpipe.report.words import few
from hybridpipe.training.planner.choice import Choice, choose_on_rank_0, measured_cluster
from hybridpipe.training.planner.machines import MachinesFile, conditions
from hybridpipe.training.planner.memory import check_room
from hybridpipe.training.planner.shards import first_shard, numbers_of_shards
from hybridpipe.types import Loss


def _shareable(request: PlanOptions, model: nn.Module, rule: UpdateRule, group: TrainingGroup) -> PlanOptions:
    """Return the request; nothing is sharded by choice if the optimizer cannot update parts of parameters.

    Collective: a trial may fail on one rank alone, as for want of memory.
    """
    if request.zero != AUTO:
        return request
    with failure.guard():  # the user's factory may fail on this rank alone
        here = rule.why_not_halved(model)
    why = next(filter(None, group.everyone.allgather(here)), None)
    if why is None:
        return request
    if group.leads:
        notices.tell(f"replicas shard no update: {why}")
    return replace(request, zero=0)


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan that is ready to run.

    Args:
        choice: the reasons for it; None for a given plan without prediction.
        memory: of this rank.
        numbers: of tensors on the meta device.
        progress_thread: True if the transport has one.
        splittable: the modules that the plan may split over ranks.
    """

    plan: Plan
    choice: Choice | None
    layers: Layers
    memory: RankMemory
    numbers: Numbers | None
    progress_thread: bool
    splittable: Splittable = NOTHING_TO_SPLIT


class Planner:
    """Makes the plan of one training.

    Args:
        options: of the training; with a limit of memory a given plan is predicted as well.
        model, numbers: the model, and the numbers of its tensors on the meta device.
        rule: optimizer and settings of updates.
        group: the ranks to plan for; all groups have the plan of the first.
        device: of this rank.
        minibatch_size: samples of a minibatch, of which the group trains on its part.
        microbatch_size: samples of a microbatch; None for a default or, with "auto", the best of several.
        say: called with lines about what is measured.

    Raises:
        ValueError: a given plan does not fit model, world or minibatch; the message shows the arithmetic.
        UserError: the wanted backend cannot be used.
    """

    def __init__(
        self,
        options: Options,
        model: nn.Module,
        numbers: Numbers | None,
        loss: Loss,
        rule: UpdateRule,
        group: TrainingGroup,
        device: torch.device,
        minibatch_size: int,
        microbatch_size: int | None,
        say: Callable[[str], None],
    ) -> None:
        self.numbers, self._say, self._group, world = numbers, say, group, group.world
        self.folder: Path | None = None  # where measured machines are found, and kept
        request, given, memory = options.plan, options.given, options.plan.memory
        self._leads = group.leads
        request = _shareable(request, model, rule, group)
        self._request, self._model, self._loss, self._rule = request, model, loss, rule
        check_has_norms(model, rule.sync_batchnorm)
        self._layers: Layers | None = known_layers(model, rule.arithmetic)  # None before a recording
        self._predicts = request.predict or memory is not None
        self._memory_bytes = None if memory is None else memory_bytes("memory", memory)
        self._world, self._device = world, device
        self._minibatch_size = group.share_of("minibatch_size", minibatch_size)
        self._sync = options.ranks.sync
        if self._sync != AUTO_SYNC:
            _ = self.backends  # refused now if it cannot be used
        self._smaller_sizes: list[int] = []  # microbatch sizes that "auto" may also choose
        self._given, self._wanted_size = given, microbatch_size
        cluster = options.ranks.cluster
        if isinstance(cluster, str | os.PathLike):
            cluster = read_cluster(Path(cluster))
        self._cluster = cluster
        self._resumes = False  # a checkpoint was found
        self._is_preferred = False  # the given plan is a checkpoint's, in place of a search
        if isinstance(given, Plan):
            request.check_given(given)
            validate_plan(given)
            self.microbatch_size = self._fitting(given, microbatch_size)
        else:
            self.microbatch_size = microbatch_size or ceil_div(self._minibatch_size, world.size)
            if microbatch_size is None and given == AUTO:
                self._smaller_sizes = parts_of(self.microbatch_size, self._minibatch_size)

    @property
    def plan(self) -> Plan | None:
        """The given plan; None for a name."""
        return self._given if isinstance(self._given, Plan) else None

    @property
    def schedule(self) -> str:
        """The requested schedule; that of a given plan."""
        return self._request.schedule

    @cached_property
    def progress_thread(self) -> bool:
        """True if the transport has a progress thread. Collective.

        It is determined once, so that probe and training use the same transport.
        """
        return needs_progress_thread(self._world, self._device)

    @cached_property
    def _usable(self) -> Usable:
        """The backends that all ranks can use. Collective."""
        return usable(self._world, self._device)

    @property
    def backends(self) -> list[str]:
        """The backends that may sum gradients here, the default first. Collective at its first use."""
        if self._sync != AUTO_SYNC or self.plan is None or self.plan.sync is None:
            return suited(self._usable, self._sync)
        of_plan = self.plan.sync
        return suited(self._usable, AUTO_SYNC) if of_plan in self._usable.whys else [of_plan]

    def with_sync(self, plan: Plan) -> Plan:
        """Return the plan with the backend of the user, its own, the fastest or the default. Collective."""
        if max(plan.replicas) == 1:
            return replace(plan, sync=None)
        allowed, measured = self.backends, None if self._cluster is None else self._cluster.sync
        sync = self._world.bcast(measured if measured in allowed else allowed[0])
        if self._leads:
            if plan.sync not in (None, sync):
                notices.tell(f"gradients are summed by {sync} instead of {plan.sync}, which the plan names")
            if measured not in (None, sync):
                notices.tell(f"gradients are summed by {sync}, and predictions are of {measured}'s sums")
        return replace(plan, sync=sync)

    @cached_property
    def memory(self) -> list[RankMemory]:
        """The memory of every rank, between measuring and training. Collective."""
        replicates = self._given == "dp" if self.plan is None else max(self.plan.replicas) > 1
        if replicates and self._world.size > 1:
            _ = self.backends  # Horovod's library maps 160 MB, which a kernel's limit counts
        return memory_of_ranks(self._world, self._device, self._memory_bytes, self._cluster)

    def prefer(self, plan: Plan, num_ranks: int | None) -> str | None:
        """Use a checkpoint's plan instead of a search, if it fits; return a line about it for the user.

        Args:
            num_ranks: ranks of the checkpoint's world. In a larger world the plan would leave ranks idle.

        Returns:
            None if no search is needed.
        """
        self._resumes = True
        if self._given != AUTO:
            return None
        what = f"its plan {plan.name}, {plan.schedule}"
        try:
            if num_ranks != self._world.size:
                raise ValueError(f"it was made for {num_ranks} ranks, and there are {self._world.size}")
            self._request.check_found(plan)
            # under pipedream a minibatch is one microbatch, whatever size is given
            size = None if plan.traits.whole_minibatch else self._wanted_size
            self.microbatch_size = self._fitting(plan, size)
        except ValueError as error:
            return f"{what}, does not fit here, so a new one is searched for: {error}"
        self._given, self._smaller_sizes, self._is_preferred = plan, [], True
        self._predicts = True  # as "auto" does; what was measured before is used again
        return f"with {what}"

    @property
    def waits(self) -> bool:
        """True if the plan, its prediction, or numbers that a file is to give, need the first minibatch."""
        lacks = self.numbers is not None and bool(self.numbers.lacks)
        return self.plan is None or self._layers is None or self._predicts or lacks

    @property
    def known_layers(self) -> Layers:
        """The model's layers; RuntimeError before `plan_for` if their forward must be recorded."""
        if self._layers is None:
            raise RuntimeError(
                "the model's forward is recorded with the first minibatch: prepare or train first"
            )
        return self._layers

    def _layers_of(self, minibatch: Minibatch) -> Layers:
        """Return the model's layers; record its forward on the first microbatch where needed. Collective.

        Raises:
            ValueError: the ranks' forwards differ.
        """
        if self._layers is None:
            inputs, targets = minibatch.inputs(0), minibatch.targets(0)
            arithmetic, closed = self._rule.arithmetic, self._closed()
            made = partial(layers_of, self._model, inputs, self._loss, targets, arithmetic, closed)
            layers = made()
            if layers.why_whole and self.numbers is not None:  # perhaps for want of numbers
                self.numbers.fill(self._model)
                self.numbers = None
                layers = made()
            consistency.check_alike(self._world, {"the forward of the model": layers.path})
            self._layers = layers
            settings = layers.settings if self._leads else None
            if settings is not None and (names := settings.unwatched()):
                what = "a change inside these attributes is not noticed, unless the object is replaced"
                notices.tell(f"{what}: {few(names, ', ')}")
        return self._layers

    def plan_for(self, minibatch: Minibatch | None) -> Planned:
        """Make the plan, once it fits the memory of all ranks by its prediction. Collective.

        Args:
            minibatch: the first one, whose first microbatch is measured; None unless the planner `waits`.

        Raises:
            ValueError: the given plan does not fit the layers, or no plan is found.
            UserError: the plan does not fit into the given memory.
        """
        plan, choice = (self._given, None) if minibatch is None else self._made(minibatch)
        assert isinstance(plan, Plan)
        if self._group.options.count > 1:
            plan, self.microbatch_size = self._group.everyone.bcast((plan, self.microbatch_size))
            if self._group.options.fragments > 1 and any(map(plan.splits, range(plan.num_stages))):
                raise UserError("groups of stages that are split exchange all at once: leave fragments out")
        plan = synchronised(self.with_sync(plan), self.known_layers, self._rule.sync_batchnorm)
        if choice is not None:
            choice = replace(choice, plan=plan)
        self.known_layers.check_plan(plan)
        memory = check_room(plan, self.memory, self._world.rank, self._device, self._memory_bytes is not None)
        return Planned(
            plan=plan,
            choice=choice,
            layers=self.known_layers,
            memory=memory,
            numbers=self.numbers,
            progress_thread=self.progress_thread,
            splittable=Splittable(self._experts_of(plan), self._tensors_of(plan)),
        )

    def _named_experts(self) -> Sequence[Experts]:
        """Return the modules whose experts replicas may share; none where the model's own plan fails."""
        given = self._request.expert_plan
        try:
            return experts_of(self._model, given)
        except ValueError as error:
            if given is not None:
                raise
            if self._leads:
                notices.tell(f"experts are not split: {error}")
            return ()

    def _experts_of(self, plan: Plan) -> Sequence[Experts]:
        """Return the modules whose experts a plan splits, if it does; ValueError if it cannot."""
        if not any(map(plan.splits_experts, range(plan.num_stages))):
            if self._request.expert_plan is not None:
                self._named_experts()  # a mistake in it is told at once
            return ()
        experts, layers = experts_of(self._model, self._request.expert_plan), self.known_layers
        split = split_by(plan, experts, layers.holders(plan))
        for each in experts:
            if each.keys[0] in split and not layers.calls_whole(each.path):
                told = "takes its parts apart: call the module itself"
                raise ValueError(f"the experts {each.path} cannot be split, as the model's forward {told}")
        return experts

    def _closed(self) -> Collection[str]:
        """Return the paths of modules that stay one layer, where stages may have parts of them."""
        given = self._request.tensor_plan
        splits = isinstance(self._given, Plan) and self._given.splits_tensors
        return called_whole(self._model, given) if splits or given is not None else ()

    def _tensors_of(self, plan: Plan) -> Sequence[SplitModule]:
        """Return the modules whose weights a plan splits, if it does; ValueError if it cannot."""
        given = self._request.tensor_plan
        if not plan.splits_tensors and given is None:
            return ()
        modules, layers = split_modules_of(self._model, given), self.known_layers
        parts = parts_by(self._model, plan, modules, layers.holders(plan))
        for each in modules:
            if not parts.keys().isdisjoint(each.keys) and not layers.calls_whole(each.around):
                told = f"the model's forward takes the parts of {each.around} apart: call it as a whole"
                raise ValueError(f"{each.path} cannot be split, as {told}")
        return modules

    def _made(self, minibatch: Minibatch) -> tuple[Plan, Choice | None]:
        layers = self._layers_of(minibatch)
        if isinstance(self._given, Plan):
            layers.check_plan(self._given)
            synchronised(self._given, layers, self._rule.sync_batchnorm)
            if not self._predicts:
                return self._given, None
        choice = self._choice(layers, minibatch)
        if choice is not None and self._is_preferred and (line := misfit(choice.plan, self.memory)):
            if self._leads:
                notices.tell(f"{line}; a new plan is searched for")
            self._given, self._is_preferred = AUTO, False
            if self._wanted_size is None:
                self._smaller_sizes = parts_of(self.microbatch_size, self._minibatch_size)
            choice = self._choice(layers, minibatch)
        if choice is None:
            assert isinstance(self._given, Plan)
            return self._given, None
        self._rule.check(choice.plan)
        self.microbatch_size = microbatch_size_of(choice.plan, self._minibatch_size)
        return choice.plan, choice

    def _choice(self, layers: Layers, minibatch: Minibatch) -> Choice | None:
        """Return a plan by name or the prediction of a given one; None if that cannot be predicted."""
        profile, work = self._as_before(layers, minibatch), None
        if profile is None:
            self._say("measuring the model")
            profile, work = self._measured(layers, minibatch)
        if layers.why_whole and self.plan is None and self._leads:
            notices.tell(f"the model runs as one stage: {layers.why_whole}")
        try:
            machines = self._machines(profile, work)
            del work  # with the copy of the model, whose memory the search counts as free
            cluster = replace(machines, memory_bytes=bytes_for_stages(self.memory))
            count = ceil_div(self._minibatch_size, self.microbatch_size)
            synced = partial(synchronised, layers=layers, together=self._rule.sync_batchnorm)
            kept = replace(profile, state_factor=profile.state_factor + self._group.options.memory_factor)
            choice = choose_on_rank_0(self._given, self._world, kept, cluster, count, self._request, synced)
        except NoPlanFits as error:  # the same on every rank
            raise NoPlanFits(f"{error}\n{least_left(self.memory)}") from None
        except ValueError as error:  # this, too
            if not isinstance(self._given, Plan):
                raise
            if self._leads:
                notices.tell(f"the plan runs as given, without a prediction: {error}")
            return None
        self._cluster = machines  # for a second search
        measured = replace(choice.profile, state_factor=profile.state_factor)  # which groups add nothing to
        return replace(choice, profile=measured, machines=machines)

    def _fitting(self, plan: Plan, microbatch_size: int | None = None) -> int:
        """Return the plan's microbatch size; ValueError if the plan does not fit."""
        size = microbatch_size_of(plan, self._minibatch_size, microbatch_size)
        self._rule.check(plan)
        if self._layers is not None:
            self._layers.check_plan(plan)
            synchronised(plan, self._layers, self._rule.sync_batchnorm)
        plan.check_world(self._world.size)
        return size

    def _measured(self, layers: Layers, minibatch: Minibatch) -> tuple[ModelProfile, Callable[[], object]]:
        """Return the model's profile for all microbatch sizes, and a function that runs a copy once more."""
        copy = layers.copied()
        if self.numbers is not None:
            self.numbers.fill_for_measuring(copy.model)
        names: dict[Tensor, str] = {p: name for name, p in copy.model.named_parameters()}
        with failure.guard():  # else the other ranks would wait for a failed one
            self._rule.naming(names).try_out([p for p in names if p.requires_grad][:1])
        self._suit_allocator(copy.model)
        experts = [each for each in self._named_experts() if layers.calls_whole(each.path)]
        counts = self._numbers_of_shards(layers)
        inputs, targets = minibatch.inputs(0), minibatch.targets(0)
        with failure.guard():
            try:
                rehearsed = partial(
                    Rehearsal,
                    inputs=inputs,
                    targets=targets,
                    loss=self._loss,
                    device=self._device,
                    each_kind=self.numbers is not None,
                )
                rehearsal, wanted = rehearsed(copy, experts=experts), self._request.tensor_plan
                splits = (first_shard(layers, wanted, count, self.numbers) for count in counts)
                shards = [rehearsed(split, sums=sums) for split, sums in splits]
                samples = minibatch.sizes[0]  # perhaps fewer than microbatch_size
                sizes = [samples, *(size for size in self._smaller_sizes if size < samples)]
                measure = partial(rehearsal.measure, self._rule.optimizer, sizes=sizes, shards=shards)
                return measure_together(self._world, measure), rehearsal.run
            except (MemoryError, RuntimeError) as error:
                if not out_of_memory.is_out_of_memory(error):
                    raise
                what = f"each rank measures the whole model on a microbatch of {minibatch.sizes[0]} samples"
                raise MemoryError(f"{what}: give a smaller one (train.microbatch)") from error
            except UserError:
                raise
            except (TypeError, ValueError) as error:  # an error of the model, whose traceback must show
                raise RuntimeError(f"the model fails on the first microbatch: {told(error)}") from error

    def _numbers_of_shards(self, layers: Layers) -> list[int]:
        """Return the numbers of shards whose layers are measured. Collective."""
        if isinstance(self._given, Plan):
            self._tensors_of(self._given)  # what cannot be split is told as such
            counts = {stage.tensor for stage in self._given.stages}
            return list(counts - {1}) if len(counts) == 1 else []  # others are not predicted
        given = self._request.tensor_plan
        if given is None or self._given != AUTO:
            return []
        neighbours = self._world.allreduce(this_host(self._world).local_size, MPI.MIN)
        return numbers_of_shards(layers, given, neighbours)

    def _suit_allocator(self, model: nn.Module) -> None:
        """Measure as memory will be used: what measuring frees and keeps, a near limit counts. Collective."""
        least = 2 * sum(p.nbytes for p in model.parameters() if p.requires_grad) // self._world.size
        now = memory_of_ranks(self._world, self._device, self._memory_bytes, self._cluster)
        if self._device.type == "cpu":
            allocator.suit(least, now[self._world.rank].left_bytes)  # weights and gradients, by any plan

    @property
    def _shards(self) -> bool:
        """True if replicas may shard their update under the plan."""
        if isinstance(self._given, Plan):
            return any(map(self._given.zero_of, range(self._given.num_stages)))
        return self._request.zero != 0

    def _conditions(self, profile: ModelProfile | None = None) -> dict[str, str]:
        """Describe what a measurement depends on. Collective."""
        return conditions(self._world, self._device, self._model, self._rule.precision, profile)

    def _as_before(self, layers: Layers, minibatch: Minibatch) -> ModelProfile | None:
        """Return the model, and take the machines, as the resumed training has measured them. Collective.

        None if there is no such measurement, or a plan is searched for.
        """
        folder = self._world.bcast(self.folder)
        if not self._resumes or self._given == AUTO or folder is None:
            return None
        file = MachinesFile(folder, self._conditions(), self._shards)
        before = file.read(self._world)
        if before is None or before.profile is None or before.profile.num_layers != layers.num_layers:
            return None
        self._say(f"model and machines as measured before (remove {file.path} to measure them anew)")
        self._cluster = self._world.bcast(self._cluster) or before.cluster
        return before.profile.scaled_to(minibatch.sizes[0])

    def _machines(self, profile: ModelProfile, work: Callable[[], object] | None) -> Cluster:
        """Return the machines, measured now or before. Collective."""
        (known, folder), file = self._world.bcast((self._cluster, self.folder)), None
        is_alone = self._world.size == 1  # no machine is measured
        if known is None and folder is not None and not is_alone:
            now = self._conditions(profile) | {"sync": ", ".join(self.backends)}
            file = MachinesFile(folder, now, self._shards)
            before = file.read(self._world)
            known = None if before is None else before.cluster
            if known is not None and self._leads:  # the report says so, too
                notices.tell(f"machines as measured before (remove {file.path} to measure them anew)")
        if known is None and not is_alone:
            self._say("measuring the machines")
        cluster = measured_cluster(
            self._world,
            profile,
            lambda: self.backends,
            work,
            progress_thread=self.progress_thread,
            cluster=known,
            device=self._device,
            with_sharding=self._shards,
        )
        if known is None and file is not None and self._leads:
            file.write(cluster, profile)
        return cluster.compressing(self._rule.compression, profile.dtype)
