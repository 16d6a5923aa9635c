"""Checkpoints of recorded models from plan to plan, and ranks that disagree about a forward."""


def test_a_checkpoint_goes_from_plan_to_plan_under_the_models_own_keys(job, tmp_path):
    done = job(3, "any_model_state.py", "moved", str(tmp_path), timeout_seconds=180)
    assert done.stdout.count(": the same") == 4, done.stdout


def test_a_checkpoint_of_one_layer_is_resumed_as_many(job, tmp_path):
    done = job(3, "any_model_state.py", "layered", str(tmp_path), timeout_seconds=180)
    assert "one layer as many: the same" in done.stdout


def test_ranks_whose_forwards_differ_are_told_before_anything_is_sent(job):
    assert "told: the forward of the model" in job(3, "any_model_state.py", "differing").stdout
