"""Replay of a plan: the real engine, messages and all-reduces, with sleeps in place of computing.

A profile gives the seconds and bytes of each layer. A scale S divides all bytes by S, for a network that is
S times as slow: a model too large for this memory keeps its timing. Rank 0 prints and writes the summary.
Not known here: sleeping layers (`cli.sleeping`).
"""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hybridpipe.cli.sleeping import Pace, SleepingLayer, SleepingOptimizer, sleeping_loss
from hybridpipe.cli.train import check_launcher
from hybridpipe.comm.mpi import MPI
from hybridpipe.errors import UserError
from hybridpipe.files import write_json
from hybridpipe.health import failure
from hybridpipe.optim.gradient_sync import BucketSync
from hybridpipe.planning.checks import NO_PREDICTION
from hybridpipe.planning.cluster import Cluster
from hybridpipe.planning.cost.formula import StageCost, stage_costs
from hybridpipe.planning.plan import Plan
from hybridpipe.planning.profile import ModelProfile
from hybridpipe.planning.scale import scaled_cluster, scaled_profile
from hybridpipe.planning.schedules.generators import programs
from hybridpipe.planning.simulator.predict import predict, simulate
from hybridpipe.training.trainer import Trainer

REPLAY_FORMAT = "hybridpipe-replay/1"
WARM_UP_SHARE, DRAIN_SHARE = 1 / 3, 1 / 6  # shares of the minibatches at either end, left out of the median
_STAT = Path("/proc/stat")


@dataclass(frozen=True)
class Replay:
    """Settings of one replay.

    Args:
        profile: the layers at full size, for the plan's microbatch size.
        cluster: the machines at full size, for the prediction; None for no prediction.
        scale: divisor of all bytes.
        num_minibatches: minibatches to run; None for enough for a median.
        overlap: False to begin all-reduces only after the whole backward.

    Raises:
        UserError: profile and plan differ in layers, or an asynchronous schedule has `overlap` False.
    """

    profile: ModelProfile
    plan: Plan
    cluster: Cluster | None
    scale: float
    num_minibatches: int | None
    overlap: bool

    def __post_init__(self) -> None:
        if self.profile.num_layers != self.plan.num_layers:
            raise UserError(
                f"replay: the plan cuts {self.plan.num_layers} layers, the profile has "
                f"{self.profile.num_layers}"
            )
        if not self.overlap and self.plan.is_asynchronous:
            raise UserError(
                f"replay: --no-overlap goes with a synchronous schedule, got {self.plan.schedule}"
            )

    def predicted(self) -> float | None:
        """Simulated seconds of a minibatch; None without a cluster.

        Raises:
            ValueError: the cluster has fewer ranks than the plan.
        """
        if self.cluster is None:
            return None
        profile, cluster = scaled_profile(self.profile, self.scale), scaled_cluster(self.cluster, self.scale)
        seconds = predict(self.plan, profile, cluster)[1].minibatch_seconds
        if self.overlap:
            return seconds
        costs = [_after_backward(cost) for cost in stage_costs(profile, self.plan)]
        return simulate(programs(self.plan), self.plan, costs, cluster).seconds


def replay(settings: Replay, out: Path) -> int:
    """Run a replay and write `out`/summary.json. Returns exit code 0. Collective."""
    failure.install()
    check_launcher()
    rank = MPI.COMM_WORLD.rank
    try:
        trainer = _trainer(settings, rank)
        predicted = settings.predicted() if rank == 0 else None
        if rank == 0:
            out.mkdir(parents=True, exist_ok=True)
    except ValueError as error:
        failure.refuse(error)
    except OSError as error:
        failure.refuse(UserError(f"{out}: cannot be made: {error.strerror}"))
    sync = trainer.worker.executor.sync
    if isinstance(sync, BucketSync):
        sync.overlaps = settings.overlap
    size = settings.plan.num_microbatches
    samples = torch.zeros((settings.num_minibatches or enough_minibatches(settings.plan)) * size, 1)
    before = _processor_time()
    trainer.fit(torch.utils.data.TensorDataset(samples, samples), shuffle=False)
    load = _processor_load(before, _processor_time())
    summary = trainer.summary()
    seconds = pace([record.seconds for record in trainer.metrics.records], round_length(settings.plan))
    trainer.close()
    if summary is not None:
        _finish(settings, summary, seconds, predicted, load, out)
    return 0


def enough_minibatches(plan: Plan) -> int:
    """Minibatches enough for a median: ten rounds and, if asynchronous, those that fill the pipeline."""
    return 10 * round_length(plan) + plan.is_asynchronous * 2 * plan.num_ranks


def round_length(plan: Plan) -> int:
    """Minibatches after which the timing of an asynchronous pipeline repeats, approximately."""
    return max(plan.replicas) if plan.is_asynchronous else 1


def pace(seconds: Sequence[float], length: int) -> float:
    """Median over rounds of the mean seconds of a minibatch, without warm-up and drain.

    Args:
        seconds: of each minibatch, in order.
        length: minibatches of a round.
    """
    full = seconds[round(len(seconds) * WARM_UP_SHARE) : len(seconds) - round(len(seconds) * DRAIN_SHARE)]
    rounds = [full[i : i + length] for i in range(0, len(full) - length + 1, length)]
    return statistics.median(map(statistics.mean, rounds or [seconds]))


def _trainer(settings: Replay, rank: int) -> Trainer:
    """Build a trainer of sleeping layers; only what this rank sends or reduces has its real size."""
    plan, profile, own_pace = settings.plan, scaled_profile(settings.profile, settings.scale), Pace()
    place = plan.place(rank)
    held = [] if place is None else [plan.stages[s] for s in plan.held_stages(place)]
    cuts = {stage.stop for stage in held} - {plan.num_layers}
    reduced = {i for stage in held if stage.replicas > 1 for i in range(stage.start, stage.stop)}
    layers = [
        SleepingLayer(
            layer,
            own_pace,
            reduced=i in reduced,
            cut=i + 1 in cuts,
            leads=any(i == stage.start for stage in held),
            ends=any(i + 1 == stage.stop for stage in held),
            split=plan.traits.splits_backward,
        )
        for i, layer in enumerate(profile.layers)
    ]
    whole = sum(profile.layers[i].update_seconds for s in held for i in range(s.start, s.stop))
    shards = place is not None and plan.zero_of(place.stage) > 0
    update_seconds = whole / (held[0].replicas if shards else 1)

    def optimizer(parameters: Iterable[Tensor]) -> SleepingOptimizer:
        return SleepingOptimizer(parameters, own_pace, update_seconds)

    return Trainer(
        nn.Sequential(*layers),
        loss=sleeping_loss,
        optimizer=optimizer,  # a function has one name on all ranks; `update_seconds` differ
        plan=replace(plan, predicted=None, prediction=NO_PREDICTION),  # it takes hardly any time
        minibatch_size=plan.num_microbatches,
        verbose=False,
    )


def _after_backward(cost: StageCost) -> StageCost:
    """Return the cost with every gradient ready only at the end of the backward."""
    return replace(cost, buckets=tuple(replace(bucket, fraction=1.0) for bucket in cost.buckets))


def _finish(
    settings: Replay, summary: dict[str, Any], seconds: float, predicted: float | None, load: float, out: Path
) -> None:
    """Write and print the results."""
    moved = "bytes_sent_p2p", "bytes_allreduced", "bytes_gathered"
    wanted = ("plan", "schedule", "ranks", "minibatches", *moved)
    write_json(
        out / "summary.json",
        {
            "format": REPLAY_FORMAT,
            **{name: summary[name] for name in wanted},
            "scale": settings.scale,
            "overlap": settings.overlap,
            "minibatch_seconds_median": seconds,
            "predicted_minibatch_seconds": predicted,
            "samples_per_second": settings.profile.samples * settings.plan.num_microbatches / seconds,
            "peak_memory_bytes": summary["peak_memory_bytes"],
            "processor_load": load,
        },
    )
    text = f"{seconds * 1e3:.1f} ms a minibatch measured"
    if predicted:
        text += f", {predicted * 1e3:.1f} ms predicted ({predicted / seconds - 1:+.0%})"
    plan = settings.plan
    print(f"{plan.name}, {plan.schedule}: {text}; processors {load:.0%} busy; written to {out}")


def _processor_time() -> tuple[float, float]:
    """Time that this machine's processors have been busy and idle since boot, in clock ticks."""
    if not _STAT.is_file():
        return 0.0, 0.0
    user, nice, system, idle, waiting, *more = map(float, _STAT.read_text().split("\n", 1)[0].split()[1:8])
    return user + nice + system + sum(more), idle + waiting


def _processor_load(before: tuple[float, float], after: tuple[float, float]) -> float:
    """Busy share of the processors, by all processes, between two times; NaN if unknown."""
    busy, idle = (b - a for a, b in zip(before, after, strict=True))
    return busy / (busy + idle) if busy + idle else float("nan")
