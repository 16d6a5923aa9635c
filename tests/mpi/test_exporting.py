def test_what_is_exported_is_what_the_ranks_hold(job, tmp_path):
    assert "the same" in job(3, "exporting.py", str(tmp_path)).stdout
