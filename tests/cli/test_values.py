"""What the command line refuses, in one line."""

import pytest

from hybridpipe.cli.main import main


@pytest.mark.parametrize("given", ["-1", "nan", "inf", "soon", "1e9"])
def test_a_hang_timeout_is_seconds(given, capsys):
    with pytest.raises(SystemExit) as left:
        main(["train", "some.toml", f"--hang-timeout={given}"])
    assert left.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"--hang-timeout: must be a number of seconds from 0 to 1e6, got '{given}'" in line
