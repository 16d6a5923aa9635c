"""What tests of trainers in a world of one rank share. Loads torch only where it is used: few need it."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.start import forked, sitecustomize

# Processes that tests start run `sitecustomize` at their start; this one has begun.
START = str(Path(sitecustomize.__file__).parent)
if START not in (paths := os.environ.get("PYTHONPATH", "").split(os.pathsep)):
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [START, *paths]))

# Open MPI's component for libfabric sleeps a second in each MPI_Init, of which the tests have hundreds.
os.environ.setdefault("OMPI_MCA_btl", "^ofi")
# Tests that run at once leave the cores to each other while their ranks wait.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMPI_MCA_threads_pthreads_yield_strategy"] = "nanosleep"
# Tests that run at once have 80 columns by pytest-xdist, and tables would be cut off there.
os.environ.pop("COLUMNS", None)

JOBS = ("benchmarks", "campaigns", "launch", "measure", "mpi")  # folders whose tests start jobs
ALONE = ("measure",)  # folders of them whose tests need the cores for themselves
STARTED = ("launch", "measure")  # folders whose tests are about processes and what one takes: no forks


def folder_of(path):
    return path.relative_to(Path(__file__).parent).parts[0]


def pytest_collection_modifyitems(items):
    for item in items:
        if folder_of(item.path) in ALONE:
            item.add_marker(pytest.mark.alone)
        if folder_of(item.path) in JOBS or item.get_closest_marker("alone"):
            item.add_marker(pytest.mark.jobs)


def pytest_addoption(parser):
    campaigns = parser.getgroup("campaigns", "campaigns (-m campaign)")
    campaigns.addoption("--campaign", type=int, metavar="N", help="random jobs; default: the campaign's own")
    campaigns.addoption("--campaign-seed", type=int, default=0, metavar="SEED", help="which; default: 0")


@pytest.fixture(scope="session")
def fork_server(tmp_path_factory):
    """Path of the socket of a fork server, which ends with the session."""
    path = tmp_path_factory.mktemp("fork-server") / "socket"
    command = [sys.executable, "-m", "tests.start.fork_server", str(path)]
    # One thread: a process that has more cannot fork.
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"}
    ) as server:
        while not path.exists():
            assert server.poll() is None, "the fork server has ended"
            time.sleep(0.01)
        yield str(path)
        server.stdin.close()


@pytest.fixture(autouse=True)
def ranks_begin_as_forks(request, monkeypatch):
    """Ranks that a test starts are forks of a process that has imported torch, if the test is a job's."""
    if request.node.get_closest_marker("jobs") and folder_of(request.path) not in STARTED:
        monkeypatch.setenv(forked.SOCKET, request.getfixturevalue("fork_server"))


@pytest.fixture
def quick(monkeypatch):
    """One thread, the same numbers each time, and next to no measuring."""
    import torch

    from hybridpipe.measure import layers

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(layers, "MAX_REPEATS", 2)
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture
def make_trainer():
    """Trainers that are closed afterwards, and silent: what is told is a notice."""
    from hybridpipe import Trainer

    trainers = []

    def make(model, **options) -> Trainer:
        trainers.append(Trainer(model, **({"verbose": False} | options)))
        return trainers[-1]

    yield make
    for trainer in trainers:
        trainer.close()
