"""BatchNorm over several replicas' microbatches trains what one process does with these as one batch."""

import pytest

ALL = "1f1b,gpipe,zero-bubble,recompute,recompute-zero-bubble,zero"


def test_a_resnet_under_any_plan_is_that_of_one_process(job):
    """The last minibatch has three microbatches, so that a replica joins without one."""
    done = job(4, "sync_batchnorm.py", "resnet", "2", ALL, "2", "4", "2-1", "2-2", timeout_seconds=300)
    assert done.stdout.count("state within") == 4 * 6


def test_four_replicas_normalise_together(job):
    done = job(4, "sync_batchnorm.py", "resnet", "4", "1f1b,zero-bubble", "4")
    assert done.stdout.count("state within") == 2


@pytest.mark.parametrize("model", ["custom", "dense", "frozen", "recorded", "cumulative", "untracked"])
def test_norms_of_many_kinds_are_those_of_one_process(job, model):
    done = job(4, "sync_batchnorm.py", model, "2", "1f1b,zero-bubble,recompute", "4", "2-2")
    assert done.stdout.count("state within") == 6


def test_a_syncbatchnorm_normalises_all_replicas_of_its_stage(job):
    done = job(3, "sync_batchnorm.py", "synced", "3", "1f1b,recompute", "3")
    assert done.stdout.count("state within") == 2


def test_the_default_leaves_each_microbatch_to_itself(job):
    done = job(2, "sync_batchnorm.py", "resnet", "1", "1f1b", "2", "1-1")
    assert done.stdout.count("state within") == 2


def test_any_plan_goes_on_with_what_replicas_normalised(job, tmp_path):
    done = job(4, "sync_batchnorm.py", "--resume", str(tmp_path), "2", "2", "2-1", "4", "2")
    assert done.stdout.count("resumed and saved") == 4
    assert "sync_batchnorm: the training has '1', the checkpoint '2'" in done.stdout
