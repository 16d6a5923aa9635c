"""What tests of trainers in a world of one rank share. Loads torch only where it is used: few need it."""

import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from hybridpipe.launch import mpirun
from tests.start import forked, sitecustomize

ROOT = Path(__file__).parents[1]

# Processes that tests start run `sitecustomize` at their start; this one has begun.
START = str(Path(sitecustomize.__file__).parent)
if START not in (paths := os.environ.get("PYTHONPATH", "").split(os.pathsep)):
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [START, *paths]))

# Open MPI's component for libfabric sleeps a second in each MPI_Init, of which the tests have hundreds.
os.environ.setdefault("OMPI_MCA_btl", "^ofi")
# Tests that run at once leave the cores to each other while their ranks and threads wait.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMPI_MCA_threads_pthreads_yield_strategy"] = "nanosleep"
    os.environ["OMP_WAIT_POLICY"] = "passive"
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


@contextmanager
def serving():
    """Give the folder of the sockets of fork servers, which end at the end."""
    # One thread: a process that has more cannot fork. Huge pages as mpirun sets them.
    env = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"} | mpirun.HUGE_PAGES
    options = {"stdin": subprocess.PIPE, "env": env, "cwd": ROOT, "process_group": 0}
    with tempfile.TemporaryDirectory(prefix="hybridpipe-") as folder, ExitStack() as servers:
        sockets = [Path(folder, str(number)) for number in range(forked.NUM_SERVERS)]
        commands = [[sys.executable, "-m", "tests.start.fork_server", path] for path in sockets]
        started = [servers.enter_context(subprocess.Popen(command, **options)) for command in commands]
        for server in started:
            servers.callback(server.stdin.close)
        while not all(path.exists() for path in sockets):
            assert all(server.poll() is None for server in started), "a fork server has ended"
            time.sleep(0.01)
        yield folder


@pytest.fixture(scope="session")
def fork_servers():
    with serving() as folder:
        yield folder


@pytest.fixture(autouse=True)
def ranks_begin_as_forks(request, monkeypatch):
    """Ranks that a test starts are forks of a process that has imported torch, if the test is a job's."""
    if request.node.get_closest_marker("jobs") and folder_of(request.path) not in STARTED:
        monkeypatch.setenv(forked.SOCKETS, request.getfixturevalue("fork_servers"))


@pytest.fixture
def quick(monkeypatch):
    """One thread, the same numbers each time, and next to no measuring."""
    import torch

    from hybridpipe.measure import turns

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(turns, "MAX_REPEATS", 2)
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
