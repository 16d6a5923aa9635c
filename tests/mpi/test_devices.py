"""The same tests on a GPU, which all ranks share if there is one, and in part on the CPU."""

import re

import pytest
import torch

from hybridpipe.comm.cuda_ipc import WANTED

NO_GPU = "needs a GPU: torch.cuda.is_available() is False"
SECONDS = 150


def on_gpu(plans: int, *more: str):
    """The GPU and the number of plans to try on it; skipped without one."""
    no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_GPU)
    return pytest.param("cuda", plans, *more, marks=no_gpu)


@pytest.fixture
def on_device(job, tmp_path):
    """What on_device.py prints on so many ranks, a line for each plan."""

    def run(ranks: int, device: str, what: str, *more: str, ipc: str = "1") -> list[str]:
        env = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # else cuBLAS may add in another order from run to run
        env |= {WANTED: ipc}
        done = job(ranks, "on_device.py", device, what, *more, timeout_seconds=SECONDS, env=env)
        return re.findall(r"^Kind.*: losses within .*, weights within .*$", done.stdout, re.MULTILINE)

    return run


pytestmark = pytest.mark.timeout(SECONDS + 30)


@pytest.mark.parametrize("device, plans, ipc", [("cpu", 3 + 1, "1"), on_gpu(9 + 3, "1"), on_gpu(9 + 3, "0")])
def test_every_schedule_trains_what_the_cpu_trains(on_device, device, plans, ipc):
    """On a GPU that all ranks share, by CUDA IPC where it works, and by way of pinned memory."""
    assert len(on_device(4, device, "exact", ipc=ipc)) == plans


@pytest.mark.parametrize("device, plans", [("cpu", 3), on_gpu(9)])
def test_dropout_and_recomputation_draw_what_one_process_draws(on_device, device, plans):
    assert len(on_device(4, device, "dropout")) == plans


@pytest.mark.parametrize("device, plans", [("cpu", 3 * 3), on_gpu(3 * 9 + 2)])
def test_low_precision_follows_one_process(on_device, device, plans):
    assert len(on_device(4, device, "low")) == plans


@pytest.mark.parametrize("device, plans", [on_gpu(9)])
def test_the_host_waits_for_a_gpu_in_no_microbatch(on_device, device, plans):
    """tests/engine/test_waits.py tries it over a stand-in."""
    assert len(on_device(4, device, "waits")) == plans


@pytest.mark.parametrize("device, plans", [("cpu", 3), on_gpu(3)])
def test_a_resumed_training_is_the_same_bit_for_bit(on_device, device, plans, tmp_path):
    assert len(on_device(4, device, "resume", str(tmp_path))) == plans
