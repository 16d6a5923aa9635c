"""Values: parsers of command-line values. A wrong value raises ArgumentTypeError with one line."""

import argparse
import math
import re
from collections.abc import Callable
from typing import TypeVar

from hybridpipe.errors import shown
from hybridpipe.planning.checks import MAX_RANKS

Number = TypeVar("Number", int, float)
MOST = 2**53  # the largest count: floats represent every integer up to here exactly


def positive(text: str, most: int = MOST) -> int:
    """An integer from 1 to `most`."""
    value = int(text[:20]) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be an integer >= 1, got {text!r}")
    if value > most:
        raise argparse.ArgumentTypeError(f"must be an integer <= {most}, got {shown(text)}")
    return value


def ranks(text: str) -> int:
    """A number of ranks, from 1 to MAX_RANKS."""
    return positive(text, MAX_RANKS)


def factor(text: str) -> float:
    """A finite number >= 1."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 1 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number >= 1, got {text!r}")
    return value


def zero(text: str) -> int | str:
    """0, 1, 2 or "auto"."""
    if text not in ("0", "1", "2", "auto"):
        raise argparse.ArgumentTypeError(f"must be 0, 1, 2 or auto, got {text!r}")
    return int(text) if text.isdecimal() else text


def hang_timeout(text: str) -> float:
    """Seconds from 0 to 1e6."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1e6:
        raise argparse.ArgumentTypeError(f"must be a number of seconds from 0 to 1e6, got {text!r}")
    return value


def sizes(text: str) -> tuple[int, ...]:
    """Positive integers separated by commas; repetitions are dropped."""
    return tuple(dict.fromkeys(map(positive, text.split(","))))


def bandwidth(text: str) -> float:
    """Bytes per second, from a number or a text such as 10Gbit."""
    from hybridpipe.planning.cluster_transform import parse_bandwidth

    return _parsed(parse_bandwidth, text)


def seconds(text: str) -> float:
    """Seconds, from a number or a text such as 50us."""
    from hybridpipe.planning.cluster_transform import parse_seconds

    return _parsed(parse_seconds, text)


def num_bytes(text: str) -> int:
    """Bytes, from a number or a text such as 2GB or 512MiB."""
    from hybridpipe.planning.quantities import parse_bytes

    return _parsed(parse_bytes, text)


def _parsed(parse: Callable[[str], Number], text: str) -> Number:
    try:
        return parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def plan_source(text: str) -> str:
    """A plan's name (auto, dp, straight) or the path of a .json file."""
    from hybridpipe.config.options import SOURCES

    if text not in SOURCES and not text.endswith(".json"):
        raise argparse.ArgumentTypeError(f"must be {', '.join(SOURCES)} or a .json file, got {text!r}")
    return text


def plan_sources(text: str) -> list[str]:
    """Plan sources separated by commas."""
    return [plan_source(name) for name in names(text)]


def names(text: str) -> list[str]:
    """Names separated by commas; empty ones are dropped."""
    return [name for name in text.split(",") if name]


def one_line(text: str) -> str:
    """Text that is not empty and has no control characters."""
    if not text.isprintable() or not text:
        raise argparse.ArgumentTypeError(f"must be one line of text, got {text!r}")
    return text


def sbatch_option(text: str) -> str:
    """A further option of sbatch, such as --qos=high."""
    if not one_line(text).startswith("-"):
        raise argparse.ArgumentTypeError(f"must be an option of sbatch, such as --qos=high, got {text!r}")
    return text


def time_limit(text: str) -> str:
    """A time as Slurm takes it: minutes, 30:00, 12:00:00, 1-12 or 1-12:00:00."""
    if not re.fullmatch(r"\d+(:\d\d?){0,2}|\d+-\d+(:\d\d?){0,2}", text):
        allowed = "minutes, MINUTES:SECONDS, HOURS:MINUTES:SECONDS or DAYS-HOURS[:MINUTES[:SECONDS]]"
        raise argparse.ArgumentTypeError(f"must be {allowed}, got {text!r}")
    return text


def memory_size(text: str) -> str:
    """Memory as Slurm takes it: megabytes, or a number with K, M, G or T."""
    if not re.fullmatch(r"\d+[KMGT]?", text):
        raise argparse.ArgumentTypeError(f"must be a number with K, M, G or T, such as 64G, got {text!r}")
    return text


def count(text: str) -> int:
    """An integer from 0 to MOST."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be an integer >= 0, got {text!r}")
    return positive(text) if text.strip("0") else 0


def hosts(text: str) -> dict[str, int]:
    """Ranks of each host: "h1:4,h2" is {"h1": 4, "h2": 1}."""
    found = {}
    for each in names(text):
        name, _, slots = each.partition(":")
        if not name or name in found:
            raise argparse.ArgumentTypeError(f"must be hosts and ranks such as h1:4,h2:4, got {text!r}")
        try:
            found[name] = ranks(slots or "1")
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentTypeError(f"ranks of {name} {error}") from None
    return found
