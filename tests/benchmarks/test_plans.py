"""Plans of the benchmarks: the balanced cut, and that it is measured once."""

import pytest
from plans import balanced, measured_cuts

from hybridpipe.files import read_profile


@pytest.mark.parametrize("seconds, num_stages, expected", [((1, 1, 1, 3), 2, (3,)), ((2, 1, 1, 2), 2, (2,))])
def test_the_balanced_cut_has_the_shortest_longest_stage(seconds, num_stages, expected):
    assert balanced(seconds, num_stages) == expected


def test_the_cut_is_measured_once(tmp_path):
    settings = {"OMP_NUM_THREADS": "1", "OMPI_MCA_mpi_yield_when_idle": "1"}
    found = measured_cuts("tiny", 2, 4, settings, tmp_path)
    profile = tmp_path / "4-microbatches" / "profile.json"
    assert 1 <= found[0] < read_profile(profile).num_layers
    written = profile.stat().st_mtime_ns
    assert measured_cuts("tiny", 2, 4, settings, tmp_path) == found
    assert profile.stat().st_mtime_ns == written
