"""Callbacks under mpirun: what one rank wants all do, and all see the same."""


def test_callbacks_are_alike_on_all_ranks(job, tmp_path):
    assert "callbacks: alike" in job(3, "callbacks.py", str(tmp_path)).stdout
    assert (tmp_path / "log.csv").read_text().startswith("step,name,value\n")
