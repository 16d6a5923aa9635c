"""Nothing that is not finite is saved as good, whichever rank holds it."""

import pytest

from tests.mpi.output import own_lines

TOLD = {
    "state": "optimizer.2.weight.exp_avg_sq is not finite: 1 NaN and 0 infinite of 24; nothing is saved; "
    "the checkpoint before, if there is one, stays the latest",
    "older": "2.weight is not finite: 1 NaN and 0 infinite of 24, and so it is in the resumed checkpoint: "
    "take an earlier one",
}


@pytest.mark.parametrize("what, last", [("state", 4), ("older", 8)])
def test_what_one_rank_finds_ends_the_job_in_one_line(job, tmp_path, what, last):
    """Optimizer state alone was saved as good; and a training that was over already did not look at all."""
    printed = job(2, "spoilt.py", str(tmp_path), what, fails=True).stdout
    assert own_lines(printed) == [f"hybridpipe: after step 8 {TOLD[what]}"], printed
    assert "Traceback" not in printed and "ended well" not in printed
    steps = sorted(path.name for path in tmp_path.glob("*step*"))
    assert steps == [f"step-{step:08d}" for step in range(4, last + 1, 4)]
    assert (tmp_path / "latest").read_text().strip() == f"step-{last:08d}"
