"""What a stage's layers may be, and what ranks agree on."""


def test_batch_norm(job):
    job(3, "batchnorm.py")


def test_values_of_many_kinds_cross_cuts(job):
    assert "all cuts crossed" in job(4, "cuts.py").stdout


def test_ranks_reduce_alike_whether_or_not_they_have_used_horovod_before(job):
    """With two hosts of two ranks, only the first host's had, and `--plan auto` waited forever."""
    job(2, "starting_horovod.py", env={"HOROVOD_CYCLE_TIME": "10"})
