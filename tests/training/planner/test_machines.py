"""Machines are measured once in a training's folder, and again where something has changed."""

from dataclasses import replace
from functools import partial

import pytest
from torch import nn

from hybridpipe.comm.mpi import MPI
from hybridpipe.measure.probe import CPU
from hybridpipe.planning.cluster import Cluster
from hybridpipe.planning.profile import LayerProfile, ModelProfile
from hybridpipe.training.planner.machines import MACHINES, MachinesFile, MeasuredMachines, conditions

ONE, CLUSTER = MPI.COMM_SELF, Cluster.flat(1, 1e9, 1e-5)
LAYER = LayerProfile("layer", 1.0, 2.0, 100, 50, 0)
PROFILE = ModelProfile((LAYER,), samples=4)
MODEL = nn.Linear(2, 3)
of_model = partial(conditions, ONE, CPU, MODEL, "fp32")
NOW = of_model(PROFILE)


def test_a_measurement_returns_under_the_same_conditions_only_and_without_its_memory(tmp_path):
    file = MachinesFile(tmp_path / "new", NOW, with_sharding=True)
    assert file.read(ONE) is None
    file.write(replace(CLUSTER, memory_bytes=5), PROFILE)
    assert file.read(ONE) == MeasuredMachines(NOW, CLUSTER, with_sharding=True, profile=PROFILE)
    assert MachinesFile(tmp_path / "new", of_model(), True).read(ONE) is not None
    for name in NOW:
        assert MachinesFile(tmp_path / "new", NOW | {name: "other"}, True).read(ONE) is None


def test_one_without_what_zero_needs_serves_only_plans_without_zero(tmp_path):
    MachinesFile(tmp_path, NOW, with_sharding=False).write(CLUSTER, PROFILE)
    assert MachinesFile(tmp_path, NOW, with_sharding=False).read(ONE).cluster == CLUSTER
    assert MachinesFile(tmp_path, NOW, with_sharding=True).read(ONE) is None


def test_the_work_of_the_ranks_is_a_condition_and_how_long_it_took_is_not():
    wider, other = replace(LAYER, output_bytes=60), replace(LAYER, name="other")
    profiles = [replace(PROFILE, layers=(each,)) for each in (LAYER, wider, other)]
    profiles += [replace(PROFILE, samples=8), replace(PROFILE, dtype="bfloat16")]
    assert len({of_model(profile)["work"] for profile in profiles}) == 5
    slower = replace(PROFILE, layers=(replace(LAYER, forward_seconds=3.0),))
    assert of_model(slower) == NOW


def test_before_the_model_is_measured_its_tensors_and_the_precision_are_conditions():
    """An earlier training's model of as many layers was predicted in place of the one that resumed there."""
    others = nn.Linear(2, 4), nn.Linear(2, 3, bias=False), nn.Linear(2, 3).double(), nn.Sequential(MODEL)
    found = [conditions(ONE, CPU, model, "fp32") for model in (MODEL, *others)]
    found.append(conditions(ONE, CPU, MODEL, "bf16"))
    assert len({each["model"] for each in found}) == 6 and found[0].items() <= NOW.items()


@pytest.mark.parametrize("text", ["", "{}", '{"format": "hybridpipe-machines/0"}'])
def test_what_cannot_be_read_is_measured_anew(tmp_path, text):
    (tmp_path / MACHINES).write_text(text)
    assert MachinesFile(tmp_path, NOW, False).read(ONE) is None


def test_a_folder_that_cannot_be_written_is_told_and_training_goes_on(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    MachinesFile(tmp_path / "file", NOW, False).write(CLUSTER, PROFILE)
    assert capsys.readouterr().err == f"hybridpipe: {tmp_path}/file: must be a directory\n"
