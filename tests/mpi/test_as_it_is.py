"""The model is what it is when it is used, and ranks are alike in their data.

tests/training/test_model_changes.py has what one rank can show.
"""


def test_two_ranks_train_what_the_user_means_or_refuse(job):
    done = job(2, "as_it_is.py")
    assert done.stdout.count("as one process") == 2 * 6 + 1
    assert done.stdout.count("refused") == 8
    assert "expanded ones: rank 0's" in done.stdout
    assert "metrics: over the whole data set, on every rank" in done.stdout
