"""Machines are measured once in a training's folder, and again where something has changed."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hybridpipe.cli.machines import MACHINES, conditions, measured_before, remember
from hybridpipe.comm.mpi import MPI
from hybridpipe.config import load_config
from hybridpipe.planning.cluster import Cluster

CONFIG = Path(__file__).parents[1] / "campaigns" / "soak.toml"
ONE = MPI.COMM_SELF


def test_a_measurement_returns_under_the_same_conditions_only_and_without_its_memory(tmp_path):
    now, cluster = conditions(ONE, load_config(CONFIG)), Cluster.flat(1, 1e9, 1e-5)
    assert measured_before(ONE, tmp_path, now) is None
    remember(tmp_path, now, replace(cluster, memory_bytes=5))
    assert measured_before(ONE, tmp_path, now) == cluster
    for name in now:
        assert measured_before(ONE, tmp_path, now | {name: "other"}) is None


def test_the_work_of_the_ranks_is_a_condition():
    names = {"train.minibatch=16", "train.precision=bf16", "model.args.width=3"}
    found = [conditions(ONE, load_config(CONFIG, [name])) for name in names]
    assert len({each["work"] for each in found}) == 3


@pytest.mark.parametrize("text", ["", "{}", '{"format": "hybridpipe-machines/0"}'])
def test_what_cannot_be_read_is_measured_anew(tmp_path, text):
    (tmp_path / MACHINES).write_text(text)
    assert measured_before(ONE, tmp_path, conditions(ONE, load_config(CONFIG))) is None


@pytest.mark.timeout(300)
def test_a_second_training_in_the_folder_measures_no_machines(tmp_path):
    def train(*words: str) -> str:
        command = [sys.executable, "-m", "hybridpipe", "train", str(CONFIG), "--out", str(tmp_path), *words]
        sets = ["--set", "plan.predict=true", "--set", "train.epochs=1", "--plan", "dp"]
        done = subprocess.run([*command, *sets], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout

    told = f"machines as measured before (remove {tmp_path / MACHINES} to measure them anew)"
    assert told not in train()
    measured = json.loads((tmp_path / MACHINES).read_text())["cluster"]
    assert train().count(told) == 1
    again = json.loads((tmp_path / "cluster.json").read_text())
    assert {name: again[name] for name in measured} == measured, "the plan was predicted with it"
