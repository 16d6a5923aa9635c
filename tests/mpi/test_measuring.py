"""What only several processes can measure: the machines, and the model under the load that will be."""

import json

import pytest

from hybridpipe import environment
from hybridpipe.files import read_cluster, read_profile

CONFIG = """
[model]
factory = "torch.nn:Sequential"
[data]
factory = "small:data"
[optimizer]
factory = "torch.optim:SGD"
args = { lr = 0.1 }
[train]
minibatch = 8
microbatch = 2
"""
SMALL = """
import torch
from torch import nn

def net():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))

def broken():
    class Broken(nn.Linear):
        def forward(self, x):
            raise RuntimeError("injected")
    return nn.Sequential(Broken(8, 3))

def data():
    return torch.utils.data.TensorDataset(torch.ones(20, 8), torch.zeros(20, dtype=torch.long))
"""

pytestmark = pytest.mark.alone


@pytest.fixture
def config(tmp_path):
    (tmp_path / "small.py").write_text(SMALL)
    path = tmp_path / "small.toml"
    path.write_text(CONFIG.replace("torch.nn:Sequential", "small:net"))
    return str(path)


@pytest.mark.parametrize("ranks", [2, 4])
def test_probe(job, ranks):
    job(ranks, "probing.py")


def test_ranks_measure_the_model_at_once(job):
    job(3, "measuring.py")


def test_the_cores_of_bound_ranks_are_counted_together(job):
    if environment.num_cores() < 2:
        pytest.skip("needs two cores")
    job(2, "bound.py")


def test_probe_prints_a_table_and_writes_the_cluster(job, tmp_path):
    out = tmp_path / "cluster.json"
    done = job(3, "hybridpipe", "probe", "--out", str(out))
    cluster = read_cluster(out)
    assert cluster.num_ranks == 3 and len(cluster.compute_speeds) == 3
    for said in ("bandwidth", "all-reduce", "host", "3 rank(s), 3 on a machine", "how many compute at once"):
        assert said in done.stdout, done.stdout


def test_profile_on_several_ranks(job, config, tmp_path):
    out = tmp_path / "profile.json"
    done = job(2, "hybridpipe", "profile", config, "--microbatch", "4,2", "--out", str(out))
    profile = read_profile(out)
    assert (profile.samples, profile.sizes, profile.load) == (4, (2, 4), 2)
    assert done.stdout.count("written to") == 1
    assert "measured by 2 rank(s) of a machine at once, 1 compute thread(s) each" in done.stdout
    assert json.loads(out.read_text())["others"][0]["samples"] == 2


def test_an_error_of_the_model_is_told_once_with_its_traceback(job, config):
    done = job(2, "hybridpipe", "profile", config, "--set", "model.factory=small:broken", fails=True)
    assert done.stdout.count("hybridpipe: rank") == 1, done.stdout
    assert "RuntimeError: injected" in done.stdout and "in forward" in done.stdout


def test_what_is_no_model_is_told_in_a_line(job, config):
    done = job(2, "hybridpipe", "profile", config, "--set", "model.factory=small:data", fails=True)
    assert done.returncode == 2 and "must be an nn.Module, got TensorDataset" in done.stdout
    assert "Traceback" not in done.stdout
