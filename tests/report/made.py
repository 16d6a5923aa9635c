"""A training's folder, made without a training: files of a plan that was searched and simulated.

Nothing is known here of reports. Invariant: the names hold what HTML must escape.
"""

import json
from dataclasses import replace
from pathlib import Path

from hybridpipe.files import write_json
from hybridpipe.planning.cluster import Cluster, Level
from hybridpipe.planning.profile import LayerProfile, ModelProfile
from hybridpipe.planning.request import PlanRequest
from hybridpipe.planning.search.search import search
from hybridpipe.planning.simulator.predict import predict
from hybridpipe.run_folder.data import RunStart

EVIL = "<script>alert('&\"')</script>"
NUM_MINIBATCHES = 1000  # of 10 epochs


def make_run(folder: Path, num_ranks: int = 4, schedule: str = "1f1b", num_microbatches: int = 8) -> Path:
    """Write the files of a training of NUM_MINIBATCHES; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    layers = [LayerProfile(f"{EVIL}{i}", 2e-3, 4e-3, 400_000, 2_000, 800_000, 1e-3) for i in range(num_ranks)]
    profile = ModelProfile(tuple(layers), samples=4)
    cluster = Cluster((Level("host", num_ranks, 1e7, 1e-4, fit_error=5.24),), memory_bytes=10_000_000)
    candidates = search(profile, cluster, num_microbatches, PlanRequest(schedule))
    plan = candidates[0].plan
    timeline, prediction = predict(plan, profile, cluster)
    plan = replace(plan, predicted=prediction)
    files = {"plan.json": plan, "profile.json": profile, "cluster.json": cluster}
    settings = {"model": {"factory": "models:net", "args": {"name": EVIL}}, "train": {"epochs": 10}}
    start = RunStart(
        f"{EVIL}.toml",
        settings,
        "auto",
        "2026-11-27T19:48:22+00:00",
        hosts=("node1",) * num_ranks,
        num_cores=(4,) * num_ranks,
        candidates=tuple(candidates[:4]),
        notes=(f"resuming from {EVIL}",),
    )
    for name, value in {**files, "run.json": start, "summary.json": summary(plan, prediction)}.items():
        write_json(folder / name, value)
    traces = timeline.to_chrome_trace("measured", 0) + timeline.to_chrome_trace("predicted", 1)
    write_json(folder / "trace.json", {"format": "hybridpipe-trace/1", "traceEvents": traces})
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in metrics()))
    return folder


def metrics() -> list[dict[str, float]]:
    """The lines of metrics.jsonl."""
    return [
        {
            "step": i,
            "epoch": i // 100,
            "loss": 2.0 / (1 + i),
            "num_samples": 32,
            "seconds": 0.05 + i % 7 / 1000,
        }
        for i in range(NUM_MINIBATCHES)
    ]


def summary(plan, prediction):
    """The object of summary.json."""
    seconds = {"seconds": 0.06, "forward_seconds": 0.02, "backward_seconds": 0.03, "idle_seconds": 0.01}
    parts = ("forward", "backward", "step", "traffic", "allreduce", "idle")
    return {
        "format": "hybridpipe-summary/1",
        "plan": plan.name,
        "schedule": plan.schedule,
        "ranks": plan.num_ranks,
        "ranks_used": plan.num_ranks,
        "samples_per_second": 640.0,
        "minibatch_seconds_median": 0.05,
        "predicted_minibatch_seconds": prediction.minibatch_seconds,
        "predicted_samples_per_second": prediction.samples_per_second,
        "bubble_fraction": 0.25,
        "loss_first": 2.0,
        "loss_last": 0.002,
        "metrics": {"loss": 0.01, "accuracy": 0.99},
        "peak_memory_bytes": [9_500_000] * plan.num_ranks,
        "memory_before_bytes": [4_000_000] * plan.num_ranks,
        "predicted_memory_bytes": list(prediction.peak_memory_bytes),
        "bytes_sent_p2p": 1_000_000,
        "bytes_allreduced": 0,
        "updates_left_out": 2,
        "minibatches": NUM_MINIBATCHES,
        "parts": {f"{part}_seconds": {"predicted": 0.01, "measured": 0.012} for part in parts},
        "rank_seconds": {str(rank): seconds for rank in plan.ranks},
        "warnings": [f"rank 0: {EVIL}; the update is skipped"],
        "epochs": [
            {
                "epoch": e,
                "loss": 1 / (1 + e),
                "seconds": 5.0,
                "validation": {"loss": 1 / (2 + e), "accuracy": 0.9},
            }
            for e in range(10)
        ],
    }
