"""`hybridpipe report` on folders that were made by hand, and the page in a browser where there is one."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from hybridpipe.cli.main import main
from hybridpipe.notices import Notices
from hybridpipe.run_folder.report import REPORT, read_run, report_at_end, write_report
from tests.report.made import NUM_MINIBATCHES, make_run
from tests.report.pages import Tree

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    return make_run(tmp_path_factory.mktemp("report") / "digits")


@pytest.fixture
def folder(made, tmp_path) -> Path:
    return shutil.copytree(made, tmp_path / "digits")


def page(folder: Path) -> Tree:
    return Tree((folder / REPORT).read_text())


def compared(folder: Path, made: Path) -> Path:
    """A comparison of two plans, of which one has a report."""
    summary = json.loads((made / "summary.json").read_text())
    figures = {"auto": summary, "dp": summary | {"plan": "4", "samples_per_second": 320.0, "loss_last": None}}
    for name in figures:
        shutil.copytree(made, folder / name / "round0")
    write_report(folder / "auto/round0")
    document = {"format": "hybridpipe-compare/1", "ranks": 4, "rounds": 1, "runs": figures}
    (folder / "compare.json").write_text(json.dumps(document))
    return folder


def test_a_report_is_written_into_the_folder(folder, capsys):
    assert main(["report", str(folder)]) == 0
    assert capsys.readouterr().out == f"written to {folder / REPORT}\n"
    names = {"run.json", "plan.json", "profile.json", "cluster.json", "metrics.jsonl", "summary.json"}
    assert page(folder).addresses() == {"data:,", "trace.json"} | names


def test_what_is_not_there_is_told_in_one_line_and_the_rest_is_shown(folder, capsys):
    (folder / "trace.json").unlink()
    (folder / "summary.json").write_text('{"epochs": [{"epoch": "first"}]}')
    assert main(["report", str(folder)]) == 0
    damaged, missing, written = capsys.readouterr().out.splitlines()
    assert damaged.startswith(f"not in the report: {folder / 'summary.json'}: epochs[0].epoch: must be")
    assert missing == "not in the report: trace.json: is not there"
    assert written == f"written to {folder / REPORT}"
    text = page(folder).text
    assert "trace.json: is not there" in text and "bottleneck" in text.lower() and "not finished" in text


@pytest.mark.parametrize("name", ["run", "summary", "plan", "profile", "cluster", "trace"])
@pytest.mark.parametrize(
    "text", ["", "[]", '{"traceEvents": [{"ph": "X"}], "ranks": "a"}', '{"plan": 1}', "{"]
)
def test_a_damaged_file_is_told_and_the_rest_is_shown(folder, name, text, capsys):
    (folder / f"{name}.json").write_text(text)
    assert main(["report", str(folder)]) == 0
    told, _ = capsys.readouterr().out.splitlines()
    assert told.startswith(f"not in the report: {folder / name}.json: ")
    assert "Plan, and why" in page(folder).text or name == "plan"


def test_records_end_at_a_line_that_was_cut_short(folder):
    path = folder / "metrics.jsonl"
    path.write_text(path.read_text()[:-10])
    assert len(read_run(folder).records) == NUM_MINIBATCHES - 1


def test_files_of_another_model_are_left_out(folder, capsys):
    profile = json.loads((folder / "profile.json").read_text())
    (folder / "profile.json").write_text(json.dumps(profile | {"layers": profile["layers"][:2]}))
    assert main(["report", str(folder)]) == 0
    assert "profile.json: must have 4 layers, as the plan, got 2" in capsys.readouterr().out


@pytest.mark.parametrize("where", [".", "none"])
def test_another_folder_is_refused_in_one_line(tmp_path, where, capsys):
    assert main(["report", str(tmp_path / where)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "must be the folder of a training or a comparison, and has none of summary.json" in line


def test_the_end_of_a_training_does_not_depend_on_its_report(folder, capsys, monkeypatch):
    notices = Notices()  # those of this process may be full
    monkeypatch.setattr("hybridpipe.run_folder.report.notices", notices)
    assert report_at_end(folder)
    (folder / REPORT).unlink()
    (folder / REPORT).mkdir()
    assert not report_at_end(folder)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"hybridpipe: {folder / REPORT} is not written: ")
    assert line.removeprefix("hybridpipe: ") in notices.lines()


def test_a_comparison_has_a_report(made, tmp_path):
    folder = compared(tmp_path, made)
    assert main(["report", str(folder)]) == 0
    seen = page(folder)
    assert seen.addresses() == {"data:,", "auto/round0/report.html"}
    for told in ("Samples/s", "2.00×", "Loss over minibatches", "Loss over time", "640", "320"):
        assert told in seen.text, told


@pytest.mark.parametrize("text", ["{}", "[]", '{"ranks": 2, "rounds": 1, "runs": {"a": 1}}'])
def test_a_damaged_comparison_is_refused_in_one_line(tmp_path, text, capsys):
    (tmp_path / "compare.json").write_text(text)
    assert main(["report", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{tmp_path / 'compare.json'}: must " in line


def test_a_run_file_of_a_script_tells_duration_command_and_commit(folder):
    start, summary = (json.loads((folder / f"{name}.json").read_text()) for name in ("run", "summary"))
    told = {"command": "python train.py --lr 0.1", "commit": "0123456789ab-dirty"}
    (folder / "run.json").write_text(json.dumps(start | told))
    (folder / "summary.json").write_text(json.dumps(summary | {"ended": "2026-11-27T20:50:25.500+00:00"}))
    write_report(folder)
    text = page(folder).text
    assert "1:02:04 from start to end" in text and "50 s in its epochs" in text
    assert "Command of a rank: python train.py --lr 0.1" in text and "commit: 0123456789ab-dirty" in text
    assert "best epoch: 10 of 10, validation loss 0.090909" in text
    (folder / "summary.json").write_text(json.dumps(summary | {"ended": "soon"}))
    assert read_run(folder).seconds is None


def browse(folder: Path, name: str) -> "subprocess.CompletedProcess[str]":
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    options = [f"--user-data-dir={folder / 'browser'}", "--dump-dom", f"file://{folder / name}"]
    return subprocess.run([*command, *options], capture_output=True, text=True, timeout=100)


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("of", ["training", "comparison"])
def test_a_browser_shows_it_without_scrolling_sideways_or_complaining(made, tmp_path, width, of):
    """The page stands in a frame of that width, which a script around it measures."""
    folder = compared(tmp_path, made) if of == "comparison" else made
    write_report(folder)
    frame = html.escape((folder / REPORT).read_text())
    script = (
        "const [page, ...tables] = frames[0].document.querySelectorAll('html, .scroll');"
        "const over = each => each.scrollWidth - each.clientWidth;"
        f"document.title = over(page) + ({width} < 1280 ? 0 : Math.max(...tables.map(over)))"
    )
    (tmp_path / "frame.html").write_text(
        f'<iframe srcdoc="{frame}" width="{width}" height="900" style="border:0" onload="{script}"></iframe>'
    )
    done = browse(tmp_path, "frame.html")
    assert re.findall(r"<title>(.*?)</title>", done.stdout) == ["0"]
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
