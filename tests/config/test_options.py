"""Options: objects and single keywords are the same, and what does not fit is refused in one line."""

from pathlib import Path

import numpy as np
import pytest

import hybridpipe
from hybridpipe import Plan, StageSpec, Trainer
from hybridpipe.config.options import (
    SINGLE,
    DataOptions,
    GroupOptions,
    PlanOptions,
    RankOptions,
    UpdateOptions,
    gathered,
)
from hybridpipe.files import write_json
from hybridpipe.planning.request import PlanRequest

PLAN = Plan((StageSpec(0, 1, 2), StageSpec(1, 2)), "pipedream")


def options(plan="auto", update=UpdateOptions(), data=DataOptions(), ranks=RankOptions(), **single):
    return gathered(plan, update, data, ranks, single)


def test_a_keyword_fills_its_object():
    by_keyword = options(schedule="auto", zero="auto", memory="2GB", clip_grad_norm=1.0, seed=3, sync="mpi")
    by_object = options(
        PlanOptions(schedule="auto", zero="auto", memory="2GB"),
        UpdateOptions(clip_grad_norm=1.0),
        DataOptions(seed=3),
        RankOptions(sync="mpi"),
    )
    assert by_keyword == by_object


def test_a_keyword_goes_before_the_objects_field():
    given = options(
        PlanOptions(source="dp", recompute=True), UpdateOptions(precision="bf16"), precision="fp16"
    )
    assert (given.given, given.plan.recompute, given.update.precision) == ("dp", True, "fp16")
    assert options(PlanOptions(zero=2), zero=1).plan.zero == 1


def test_every_field_is_a_keyword_but_the_plans_source():
    assert len(SINGLE) == 28 and "source" not in SINGLE
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'source'"):
        Trainer(None, loss=None, optimizer=None, minibatch_size=1, source="dp")


@pytest.mark.parametrize("wrong", [["layers.*.experts"], {"layers.*.experts": 1}, "ep_dispatch_experts"])
@pytest.mark.parametrize("name", ["expert_plan", "tensor_plan"])
def test_a_plan_of_what_is_split_maps_patterns_to_styles(name, wrong):
    with pytest.raises(ValueError, match=f"{name} must map patterns of modules to styles, got "):
        PlanOptions(**{name: wrong})


def test_a_request_is_enough():
    assert options(PlanRequest(recompute=True)).plan == PlanOptions(recompute=True)


@pytest.mark.parametrize("kind", [str, Path])
def test_the_plan_may_be_a_file(tmp_path, kind):
    write_json(tmp_path / "plan.json", PLAN)
    for plan in (kind(tmp_path / "plan.json"), PlanOptions(source=kind(tmp_path / "plan.json"))):
        assert options(plan).given == PLAN


def test_a_given_plans_schedule_takes_the_place_of_the_default_one():
    """Else an option of that schedule would be refused under the default one."""
    assert options(PLAN, vertical_sync=True).plan.schedule == "pipedream"
    assert options(PLAN, schedule="gpipe").plan.schedule == "gpipe"  # refused later, as it disagrees


def test_numpy_integers_become_pythons():
    given = options(
        seed=np.int64(5), num_workers=np.int32(2), delay_warm_up=np.int64(0), max_in_flight=np.int64(3)
    )
    kept = (given.data.seed, given.data.num_workers, given.update.delay_warm_up, given.plan.max_in_flight)
    assert kept == (5, 2, 0, 3) and {type(each) for each in kept} == {int}


@pytest.mark.parametrize(
    "single, error, told",
    [
        ({"seed": 1.5}, ValueError, "seed must be a 64-bit integer, got 1.5"),
        ({"num_workers": -1}, ValueError, "num_workers must be an integer >= 0, got -1"),
        ({"collate_fn": 3}, TypeError, "collate_fn must be a function"),
        ({"hang_timeout": -1}, ValueError, "hang_timeout must be a finite number >= 0, got -1"),
        ({"sync": "nccl"}, ValueError, "sync must be one of auto, horovod, mpi, torch, got 'nccl'"),
        ({"precision": "fp8"}, ValueError, "precision must be one of fp32"),
        ({"clip_grad_norm": 0}, ValueError, "clip_grad_norm must be a finite number > 0, got 0"),
        ({"schedule": "gpip"}, ValueError, "schedule must be one of auto"),
        ({"memory": "much"}, ValueError, "memory must be "),
        ({"update": {"clip_grad_norm": 1.0}}, TypeError, "UpdateOptions, or a field of it by its name"),
        ({"plan": 3}, TypeError, "plan must be a Plan, a path or one of auto, dp, straight, got 3"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(single, error, told):
    with pytest.raises(error) as caught:
        options(**single)
    assert told in str(caught.value) and "\n" not in str(caught.value)


def test_a_misspelt_keyword_is_told_with_the_one_that_was_meant():
    with pytest.raises(TypeError, match=r"'clip_gradnorm' \(did you mean 'clip_grad_norm'\?"):
        Trainer(None, loss=None, optimizer=None, minibatch_size=1, clip_gradnorm=1.0)
    with pytest.raises(TypeError, match=r"'callback' \(did you mean 'callbacks'\?"):
        Trainer(None, loss=None, optimizer=None, minibatch_size=1, callback=[])
    with pytest.raises(TypeError, match=r"'clip_gradnorm' \(did you mean 'clip_grad_norm'\?"):
        hybridpipe.UpdateOptions(clip_gradnorm=1.0)


@pytest.mark.parametrize(
    "given, told",
    [
        ({"rule": "median"}, "rule must be "),
        ({"every": 0}, "every must be "),
        ({"every": 2, "fragments": 3}, "fragments must be <= every = 2, got 3"),
        ({"every": 2, "delay": 2}, "delay must be < every = 2, got 2"),
        ({"moving_rate": 0.3}, "moving_rate goes with rule = 'elastic', got rule = 'diloco'"),
        ({"rule": "average", "outer_lr": 0.3}, "outer_lr goes with rule = 'diloco', got rule = 'average'"),
        ({"rule": "elastic", "delay": 1}, "delay goes with rule = 'diloco', got rule = 'elastic'"),
        ({"mixing": 0.3}, "mixing goes with delay > 0, got delay = 0"),
    ],
)
def test_options_of_groups_that_would_do_nothing_are_refused(given, told):
    with pytest.raises(ValueError, match=f"^{told}"):
        GroupOptions(count=2, **given)
