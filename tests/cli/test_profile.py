"""The profile command's core in one process; tests/mpi has several."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

from hybridpipe.cli import main
from hybridpipe.cli.profile import circumstances, profile_model
from hybridpipe.config.file import Config, DataConfig, Factory, TrainConfig
from hybridpipe.errors import UserError
from hybridpipe.files import write_json
from hybridpipe.measure import turns
from hybridpipe.planning.cluster import Cluster


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def data() -> torch.utils.data.Dataset:
    return torch.utils.data.TensorDataset(torch.ones(10, 4), torch.zeros(10, dtype=torch.long))


@pytest.fixture
def config(monkeypatch) -> Config:
    monkeypatch.setattr(turns, "MAX_REPEATS", 2)
    return Config(
        model=Factory(f"{__name__}:net"),
        data=DataConfig(f"{__name__}:data"),
        optimizer=Factory("torch.optim:SGD", {"lr": 0.1}),
        train=TrainConfig(minibatch=8, microbatch=2),
    )


def test_one_size_by_default(config):
    profile = profile_model(config)
    assert (profile.samples, profile.others, profile.load) == (2, (), 1)
    whole = replace(config, train=TrainConfig(minibatch=8))
    assert profile_model(whole).samples == 8


def test_several_sizes_and_the_first_is_its_own(config):
    profile = profile_model(config, (4, 1, 10))
    assert profile.samples == 4 and [other.samples for other in profile.others] == [1, 10]
    outputs = {10: 10 * 8 * 4, 4: 4 * 8 * 4, 1: 8 * 4}
    for samples, expected in outputs.items():
        assert profile.scaled_to(samples).layers[0].output_bytes == expected
    assert "microbatches of 1, 4, 10 samples" in circumstances(profile)


class Skipping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.low, self.up = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, value):
        skip = self.down(value)
        return self.up(self.low(skip) + skip)


def test_a_model_of_any_class_is_profiled_by_the_paths_of_its_units(config, tmp_path):
    profile = profile_model(replace(config, model=Factory(f"{__name__}:Skipping")), (4, 1))
    assert [layer.name for layer in profile.layers] == ["down", "low", "up"]
    assert [layer.output_bytes for layer in profile.layers] == [4 * 8 * 4, 4 * 8 * 4, 0]
    write_json(tmp_path / "profile.json", profile)
    plan, cluster = tmp_path / "plan.json", tmp_path / "cluster.json"
    write_json(cluster, Cluster.flat(2, bandwidth=1e9, latency_seconds=1e-5))
    given = ["--profile", str(tmp_path / "profile.json"), "--cluster", str(cluster)]
    assert main.main(["plan", *given, "--minibatch", "16", "--out", str(plan)]) == 0
    assert main.main(["simulate", *given, "--plan", str(plan)]) == 0


def test_a_size_needs_as_many_samples(config):
    with pytest.raises(UserError, match="--microbatch: must be at most the data's 10 samples, got 11"):
        profile_model(config, (4, 11))


def test_memory_is_kept_as_in_training():
    """Where blocks of freed memory went back, `Linear(2048, 2048)` measured 10 ms for training's 4.3."""
    program = """
import resource, sys, torch
from hybridpipe.config.file import Config, DataConfig, Factory, TrainConfig
from hybridpipe.cli import main
from hybridpipe.cli.profile import profile_model
from hybridpipe.measure import turns
from hybridpipe.planning.cluster import Cluster

turns.MAX_REPEATS = 1
sgd = Factory("torch.optim:SGD", {"lr": 0.1})
where = [f"tests.cli.test_profile:{name}" for name in ("net", "data")]
profile_model(Config(Factory(where[0]), DataConfig(where[1]), sgd, TrainConfig(minibatch=8)))

for repeat in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(64 * 2**18)  # above the largest threshold that glibc takes
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert int(done.stdout) < 1000, done.stderr


def test_threads_are_told(config, monkeypatch):
    profile = profile_model(config)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert "7 compute thread(s)" in circumstances(profile) and "set OMP_NUM_THREADS" in circumstances(profile)
    assert "set OMP_NUM_THREADS" not in circumstances(replace(profile, load=2))
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert "set OMP_NUM_THREADS" not in circumstances(profile)


def test_alone_no_mpi_is_started():
    probe = "import sys, hybridpipe.cli.profile; print({'mpi4py', 'horovod'} & {*sys.modules})"
    assert subprocess.check_output([sys.executable, "-c", probe], text=True) == "set()\n"
