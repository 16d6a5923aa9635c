"""Recordings under way: code that a forward calls can ask whether it is being recorded.

Knows nothing else. Invariant: the answer is true inside the recorded forward only, on this rank.
"""

from collections.abc import Iterator
from contextlib import contextmanager

_depth = [0]  # recordings under way


@contextmanager
def recording_now() -> Iterator[None]:
    """Let `is_recording` be true inside this context."""
    _depth[0] += 1
    try:
        yield
    finally:
        _depth[0] -= 1


def is_recording() -> bool:
    """Return True inside a forward that is recorded, perhaps on this rank alone; its values do not count."""
    return _depth[0] > 0
