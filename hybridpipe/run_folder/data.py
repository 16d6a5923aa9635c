"""Run data: what a training or a comparison leaves in its folder, as data for a report.

Pure: nothing is read here, and torch and MPI are not known. Invariant: whatever a file may lack is optional.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

from hybridpipe.planning.cluster import Cluster
from hybridpipe.planning.plan import Plan
from hybridpipe.planning.profile import ModelProfile
from hybridpipe.planning.search.search import Candidate
from hybridpipe.planning.timeline import Timeline

RUN_FORMAT = "hybridpipe-run/1"
FILES = {  # of a training's folder, which its report leads to
    "run.json": "what the training began with",
    "plan.json": "the plan",
    "profile.json": "the model’s layers, as measured",
    "cluster.json": "the machines, as measured",
    "metrics.jsonl": "a line for each minibatch",
    "summary.json": "the results",
    "trace.json": "the timelines, for ui.perfetto.dev",
    "model.safetensors": "the trained weights",
    "checkpoints": "checkpoints",
}


@dataclass(frozen=True)
class RunStart:
    """The begin of a training: run.json.

    Args:
        config: name of the configuration or the script, and what overrides it.
        settings: by table, those that are not the defaults.
        plan_source: a plan's name, or the path of a plan.json.
        started: date and time, UTC, as ISO 8601 has them.
        hosts: by rank, the name of its host.
        num_cores: by rank, the cores of its host.
        measured: True if profile.json and cluster.json are of this training.
        device: of rank 0.
        versions: of the software.
        candidates: the best of the plans that the plan was chosen from, best first; empty for a given plan.
        notes: lines that were printed before training.
        command: the command line of a rank.
        commit: of the git work tree around the config or the script; "-dirty" behind it: it was changed.
    """

    config: str
    settings: dict[str, Any]
    plan_source: str
    started: str
    hosts: tuple[str, ...]
    num_cores: tuple[int, ...]
    measured: bool = True
    device: str = "cpu"
    versions: dict[str, str] = field(default_factory=dict)
    candidates: tuple[Candidate, ...] = ()
    notes: tuple[str, ...] = ()
    command: str = ""
    commit: str = ""
    format: str = RUN_FORMAT

    @property
    def title(self) -> str:
        """The configuration's name without folder, ending and overrides."""
        return self.config.split(" with --set ")[0].rpartition("/")[2].removesuffix(".toml")

    @property
    def begun(self) -> str:
        """Date and time of the start, for people."""
        return f"begun {self.started.replace('T', ' ').removesuffix('+00:00')} UTC"


@dataclass(frozen=True)
class Epoch:
    """An epoch of summary.json; numbers that were not finite are None."""

    epoch: int
    seconds: float
    loss: float | None = None
    validation: dict[str, float | None] | None = None


@dataclass(frozen=True)
class Summary:
    """The fields of summary.json that a report shows (docs/reference/files.md)."""

    plan: str = ""
    same_plan_as: str = ""  # of compare.json: an earlier run that ran the same plan in each round
    schedule: str = ""
    ranks: int | None = None
    ranks_used: int | None = None
    samples_per_second: float | None = None
    minibatch_seconds_median: float | None = None
    predicted_minibatch_seconds: float | None = None
    predicted_samples_per_second: float | None = None
    bubble_fraction: float | None = None
    loss_last: float | None = None
    metrics: dict[str, float | None] = field(default_factory=dict)
    epochs_to_target: int | None = None
    seconds_to_target: float | None = None
    peak_memory_bytes: tuple[int, ...] = ()
    memory_before_bytes: tuple[int, ...] = ()
    memory_limit_bytes: tuple[int | None, ...] = ()
    memory_limit_origin: tuple[str, ...] = ()
    predicted_memory_bytes: tuple[int, ...] | None = None
    bytes_sent_p2p: int | None = None
    bytes_allreduced: int | None = None
    updates_left_out: int = 0
    minibatches: int | None = None
    parts: dict[str, dict[str, float]] | None = None
    rank_seconds: dict[str, dict[str, float]] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    epochs: tuple[Epoch, ...] = ()
    ended: str = ""  # date and time, UTC, as ISO 8601 has them


class MetricsLine(NamedTuple):
    """A line of metrics.jsonl: a minibatch; `loss` may be NaN."""

    step: int
    epoch: int
    loss: float
    num_samples: int
    seconds: float
    learning_rate: float | None = None
    gradient_norm: float | None = None


@dataclass(frozen=True)
class RunData:
    """A training's folder.

    Args:
        name: of the folder.
        records: in order.
        timelines: "measured" and "predicted".
        left_out: a line for each file that is not there, or cannot be shown.
        files: names of those in the folder that a reader may want.
    """

    name: str
    start: RunStart | None = None
    summary: Summary | None = None
    plan: Plan | None = None
    profile: ModelProfile | None = None
    cluster: Cluster | None = None
    records: tuple[MetricsLine, ...] = ()
    timelines: Mapping[str, Timeline] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    files: tuple[str, ...] = ()

    @property
    def seconds(self) -> float | None:
        """Seconds from start to end of the training's last run; None if it has not ended."""
        if self.start is None or self.summary is None or not self.summary.ended:
            return None
        try:
            began, ended = map(datetime.fromisoformat, (self.start.started, self.summary.ended))
            return (ended - began).total_seconds()
        except (TypeError, ValueError):  # written by hand
            return None


@dataclass(frozen=True)
class Comparison:
    """A comparison's folder.

    Args:
        name: of the folder.
        ranks: of each job.
        rounds: of each plan and baseline.
        figures: by plan or baseline, its figures as compare.json has them.
        runs: by plan or baseline, its first round.
        links: by plan or baseline, the address of its own report, relative to the folder.
    """

    name: str
    ranks: int
    rounds: int
    figures: Mapping[str, Summary]
    runs: Mapping[str, RunData]
    links: Mapping[str, str]
