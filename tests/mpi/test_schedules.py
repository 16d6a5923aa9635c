"""What schedules leave idle, measured on layers that sleep, so that it does not depend on the cores."""

import re


def test_measured_bubbles_have_the_order_of_the_formulas(job):
    """They are printed, and lie some 0.04 above the formulas, which know no messages and no updates."""
    printed = job(4, "sleeping.py", "bubbles").stdout
    print(printed)
    found = re.findall(r"(\S+) measured (\S+) formula (\S+)", printed)
    measured = {schedule: float(share) for schedule, share, _ in found}
    assert list(measured) == ["gpipe", "1f1b", "interleaved-1f1b", "zero-bubble"]
    flushed = min(measured["gpipe"], measured["1f1b"])
    assert measured["zero-bubble"] < measured["interleaved-1f1b"] < flushed


def test_a_full_pipeline_never_waits(job):
    """Measured under load: 2 to 4 % of the time. The limit is generous, as the machine may be busy."""
    printed = job(4, "sleeping.py", "steady", "1-1", "1-1-1-1").stdout
    print(printed)
    shares = [float(share) for share in re.findall(r"waits (\S+)", printed)]
    assert len(shares) == 6
    assert max(shares) < 0.15
