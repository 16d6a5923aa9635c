import pytest

from hybridpipe.planning.quantities import duration, size


@pytest.mark.parametrize(
    "num_bytes, text",
    [(0, "0 B"), (999, "999 B"), (999.6, "1 kB"), (1250, "1.25 kB"), (2.5e6, "2.5 MB"), (3e9, "3 GB"),
     (4e12, "4 TB"), (5e15, "5,000 TB")],
)  # fmt: skip
def test_sizes_are_readable(num_bytes, text):
    assert size(num_bytes) == text


@pytest.mark.parametrize(
    "seconds, text",
    [
        (0, "0 us"),
        (1.25e-5, "12.5 us"),
        (0.0421, "42.1 ms"),
        (0.9999, "1 s"),
        (12.34, "12.3 s"),
        (12345, "12,345 s"),
    ],
)
def test_times_are_readable(seconds, text):
    assert duration(seconds) == text
