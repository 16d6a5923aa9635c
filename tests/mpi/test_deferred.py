"""A function as a model: ranks make the numbers of their own stages only, and train what the module would."""

import re


def test_a_function_trains_what_its_module_does(job):
    printed = job(3, "deferred.py", "same").stdout
    assert printed.count(": the same") == 4 and "rank 0's weights" in printed, printed


def test_checkpoints_and_files_of_weights_give_each_rank_its_part(job, tmp_path):
    printed = job(3, "deferred.py", "moved", str(tmp_path)).stdout
    assert printed.count(": the same") == 3, printed


def test_ranks_whose_functions_differ_make_whole_models(job):
    printed = job(2, "deferred.py", "differing").stdout
    assert printed.count("whole: True") == 2, printed
    assert printed.count("weight of the model must be the same on all ranks") == 2, printed


def test_no_rank_makes_the_whole_model(job):
    """192 MiB of weights: a rank has a third of them, and gradients of these."""
    printed = job(3, "deferred.py", "large").stdout
    grown = [int(number) for number in re.findall(r"grew by (\d+) MiB", printed)]
    assert len(grown) == 3 and max(grown) < 192, printed
