"""What the command line refuses, in one line."""

import argparse

import pytest

from hybridpipe.cli import values
from hybridpipe.cli.main import main


@pytest.mark.parametrize("given", ["-1", "nan", "inf", "soon", "1e9"])
def test_a_hang_timeout_is_seconds(given, capsys):
    with pytest.raises(SystemExit) as left:
        main(["train", "some.toml", f"--hang-timeout={given}"])
    assert left.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"--hang-timeout: must be a number of seconds from 0 to 1e6, got '{given}'" in line


@pytest.mark.parametrize(
    "text, value", [("2GB", 2 * 10**9), ("1.5 GiB", 3 * 2**29), ("512MiB", 2**29), ("7", 7)]
)
def test_bytes(text, value):
    assert values.num_bytes(text) == value


@pytest.mark.parametrize("text", ["", "0", "0.1B", "2GBit", "-1GB", "much", "1e9", "9" * 30])
def test_other_bytes_are_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="must be such as 2GB, 512MiB or 2000000000 bytes"):
        values.num_bytes(text)
