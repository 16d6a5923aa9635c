"""What a stage's layers may be, and what ranks agree on."""


def test_batch_norm(job):
    job(3, "batchnorm.py")


def test_values_of_many_kinds_cross_boundaries(job):
    assert "all boundaries crossed" in job(4, "boundaries.py").stdout
