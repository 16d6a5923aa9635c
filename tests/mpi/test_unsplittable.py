"""A model that is not split, on two ranks: refused under a plan that cuts it, trained by name; told once."""

REASON = "reads data that only one stage has (keep it a tensor, as torch.where does"


def test_a_plan_of_several_stages_is_refused_in_one_line_before_training(job):
    done = job(2, "unsplittable.py", "two", fails=True)
    (line,) = (line for line in done.stdout.splitlines() if "hybridpipe: " in line)
    assert f"the plan cuts num_layers = 2, the model has 1 layer: unsplittable.py:22: item {REASON}" in line
    assert line.endswith("use plan='dp'")


def test_data_parallelism_trains_it_and_rank_0_says_why_once(job):
    done = job(2, "unsplittable.py", "dp")
    assert done.stdout.count("hybridpipe: the model runs as one stage: unsplittable.py:22: item ") == 1
    assert f"1 stage, explained: why: unsplittable.py:22: item {REASON}" in done.stdout
