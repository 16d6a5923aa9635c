"""Bandwidth of pinned staging: copies out and in by size, alone, both at once, and beside computing.

Writes DIR/rank0.json: for each size in bytes the bytes per second of each way.
Usage: staging.py --device cuda --out DIR.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from hybridpipe.comm.messages import Buffers
from hybridpipe.device import GpuLanes, device_of_rank

SIZES, REPEATS = (2**16, 2**20, 2**24, 2**28), 7


def seconds(action: Callable[[], object], lanes: GpuLanes) -> float:
    """Return the median time until what an action starts is done, copies included."""
    taken = []
    for _ in range(REPEATS):
        torch.cuda.synchronize(lanes.device)
        began = time.perf_counter()
        action()
        torch.cuda.synchronize(lanes.device)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def measured(lanes: GpuLanes, num_bytes: int) -> dict[str, float]:
    """Return bytes per second by way, and the share of a copy's time that computing beside it hides."""
    host, back, there = Buffers(True).take(num_bytes), Buffers(True).take(num_bytes), lanes.empty(num_bytes)
    matrix = torch.ones(4096, 4096, device=lanes.device, dtype=torch.bfloat16)

    def compute() -> None:
        for _ in range(8):
            matrix @ matrix

    def out() -> None:
        lanes.copy_out(host, there)

    def both() -> None:
        lanes.copy_out(host, there)
        lanes.copy_in(back)

    def beside() -> None:
        both()
        compute()

    both()
    one, two, alone, together = (seconds(each, lanes) for each in (out, both, compute, beside))
    into = seconds(lambda: lanes.copy_in(back), lanes)
    return {
        "out": num_bytes / one,
        "in": num_bytes / into,
        "both": 2 * num_bytes / two,
        "hidden": max(0.0, min(1.0, (alone + two - together) / min(alone, two))),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    device = device_of_rank(0, 1, torch.cuda.device_count(), options.device)
    torch.cuda.set_device(device)
    lanes = GpuLanes(device)
    figures = {str(num_bytes): measured(lanes, num_bytes) for num_bytes in SIZES}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "rank0.json").write_text(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
