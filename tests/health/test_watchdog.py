"""What a watchdog says of a rank that gives no answer."""

import pytest

from hybridpipe.health.hang import COLLECTIVE
from hybridpipe.health.watchdog import Watchdog, _Process, _this_process


@pytest.mark.parametrize("elsewhere", [False, True])
def test_who_may_have_ended_its_script_is_told_that_methods_are_collective(elsewhere):
    """On another host, too, whose processes are not seen."""
    here = _this_process()
    watchdog = Watchdog.__new__(Watchdog)  # without ranks to ask
    watchdog._rank = 0
    watchdog._processes = [here, _Process("another", "machine", here.pid) if elsewhere else here]
    assert watchdog._fate(1).endswith(f"or it has reached the end of its script ({COLLECTIVE})")
