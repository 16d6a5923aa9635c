"""What tests of trainers in a world of one rank share. Loads torch only where it is used: few need it."""

import os
from pathlib import Path

import pytest

from tests.start import sitecustomize

# Processes that tests start run `sitecustomize` at their start; this one has begun.
START = str(Path(sitecustomize.__file__).parent)
if START not in (paths := os.environ.get("PYTHONPATH", "").split(os.pathsep)):
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [START, *paths]))

# Open MPI's component for libfabric sleeps a second in each MPI_Init, of which the tests have hundreds.
os.environ.setdefault("OMPI_MCA_btl", "^ofi")
# Tests that run at once have 80 columns by pytest-xdist, and tables would be cut off there.
os.environ.pop("COLUMNS", None)

JOBS = ("benchmarks", "campaigns", "launch", "measure", "mpi")  # folders whose tests need the cores


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.relative_to(Path(__file__).parent).parts[0] in JOBS:
            item.add_marker(pytest.mark.jobs)


def pytest_addoption(parser):
    campaigns = parser.getgroup("campaigns", "campaigns (-m campaign)")
    campaigns.addoption("--campaign", type=int, metavar="N", help="random jobs; default: the campaign's own")
    campaigns.addoption("--campaign-seed", type=int, default=0, metavar="SEED", help="which; default: 0")


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
