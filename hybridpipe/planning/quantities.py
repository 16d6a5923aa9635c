"""Quantities: bytes and seconds as people write and read them.

Not known here: what is measured. Pure.
"""

import re

from hybridpipe.planning.checks import plain, positive_int

BYTES = {each + i: base**n for i, base in (("", 1000), ("i", 1024)) for n, each in enumerate("kMGT", 1)}


def parse_bytes(text: str) -> int:
    """Return the bytes of "2GB", "1.5GiB", or a plain number of bytes, rounded down.

    Raises:
        ValueError: the text has none of these forms, or is less than a byte.
    """
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+) ?(?:([kMGT]i?)?B)?", text)
    value = int(float(match[1]) * BYTES.get(match[2], 1)) if match and len(text) <= 20 else 0
    if not value:
        raise ValueError(f"must be such as 2GB, 512MiB or 2000000000 bytes, got {text!r}")
    return value


def memory_bytes(name: str, value: int | str) -> int:
    """Return the bytes of an integer or a text (`parse_bytes`).

    Raises:
        ValueError: it is neither, or less than a byte.
    """
    if isinstance(value, str):
        try:
            return parse_bytes(value)
        except ValueError as error:
            raise ValueError(f"{name} {error}") from None
    positive_int(name, plain(value))
    return int(value)


def size(num_bytes: float) -> str:
    """Format a number of bytes, such as "1.25 MB"."""
    return _scaled(num_bytes, 1e3, "B", "kB", "MB", "GB", "TB")


def duration(seconds: float) -> str:
    """Format a number of seconds, such as "12.5 ms"."""
    if seconds >= 1:
        return f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:,.0f} s"
    return _scaled(seconds * 1e6, 1e3, "us", "ms", "s")


def _scaled(value: float, step: float, *units: str) -> str:
    unit, *larger = units
    for each in larger:
        if value < step * (1 - 5e-4):  # 999.6 would be shown as 1e+03
            break
        value, unit = value / step, each
    return f"{value:.3g} {unit}" if value < step else f"{value:,.0f} {unit}"
