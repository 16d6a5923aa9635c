"""`hybridpipe profile --from-pipedream`: the command, without what it reads (tests/planning) and measures."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hybridpipe.cli.main import main
from hybridpipe.files import read_profile

GRAPH = """\
node1 -- Input -- forward_compute_time=9.0, backward_compute_time=0.0, activation_size=8.0, parameter_size=0.0
node2 -- Linear(2, 2) -- forward_compute_time=1.0, backward_compute_time=2.0, activation_size=8.0, \
parameter_size=24.0
\tnode1 -- node2
"""


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    path = tmp_path / "graph.txt"
    path.write_text(GRAPH)
    return path


def test_writes_a_profile(graph: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "profile.json"
    assert main(["profile", "--from-pipedream", str(graph), "--samples", "128", "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"written to {out}\n"
    profile = read_profile(out)
    assert [layer.name for layer in profile.layers] == ["node2 Linear"]
    assert (profile.samples, profile.device, profile.state_factor) == (128, "published", 0.0)


def test_without_samples_a_minibatch_counts_as_one_and_that_is_told(
    graph: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "profile.json"
    assert main(["profile", "--from-pipedream", str(graph), "--out", str(out)]) == 0
    assert "--samples" in capsys.readouterr().out
    assert read_profile(out).samples == 1


def test_loads_neither_torch_nor_mpi(graph: Path, tmp_path: Path):
    arguments = ["profile", "--from-pipedream", str(graph), "--out", str(tmp_path / "p.json")]
    probe = f"import sys; from hybridpipe.cli.main import main; main({arguments!r}); "
    probe += "print({'torch', 'mpi4py', 'horovod'} & {*sys.modules})"
    assert subprocess.check_output([sys.executable, "-c", probe], text=True).endswith("set()\n")


@pytest.mark.parametrize(
    "arguments, told",
    [
        ([], "one of the arguments CONFIG --from-pipedream is required"),
        (["x.toml", "--from-pipedream", "{graph}"], "not allowed with argument CONFIG"),
        (["x.toml", "--samples", "4"], "--samples goes with --from-pipedream"),
        (["--from-pipedream", "{graph}", "--set", "a=1"], "with CONFIG, not with --from-pipedream"),
        (["--from-pipedream", "{graph}", "--samples", "0"], "--samples: must be an integer >= 1, got '0'"),
        (["--from-pipedream", "{graph}.no"], "{graph}.no: cannot be read: No such file or directory"),
    ],
)
def test_a_mistake_is_told_in_one_line(
    graph: Path, arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
):
    try:
        code = main(["profile", *(each.format(graph=graph) for each in arguments)])
    except SystemExit as stop:  # argparse's
        code = stop.code
    error = capsys.readouterr().err
    assert code == 2
    assert told.format(graph=graph) in error and error.count("\n") == 1


@pytest.mark.parametrize(
    "content, told",
    [
        (b"", "nodes must hold at least one layer"),
        (b"\x89PNG\r\n\x1a\n", "must be UTF-8 text, got byte 0x89"),
        (b"\0\1\2", "line 1: node must be"),
        (GRAPH.encode() + b"\tnode2 -- node9\n", "line 4: edge must join nodes of the file, got 'node9'"),
    ],
)
def test_a_mistake_in_the_file_names_file_and_line(
    graph: Path, content: bytes, told: str, capsys: pytest.CaptureFixture[str]
):
    graph.write_bytes(content)
    assert main(["profile", "--from-pipedream", str(graph)]) == 2
    assert capsys.readouterr().err.startswith(f"hybridpipe: {graph}: {told}")


def test_a_reader_that_is_gone_gets_no_traceback(graph: Path, tmp_path: Path):
    """`hybridpipe plan ... | head` ended with one."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "hybridpipe", "profile", "--from-pipedream", str(graph)]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "profile.json")],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")
