"""launch/setup and `hybridpipe setup` say in one line what they cannot do, before they do anything.

launch/test shows the rest.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from hybridpipe.install import bundle

REPOSITORY = Path(__file__).parents[2]
SETUP_WRITES = [REPOSITORY / ".venv" / f"hybridpipe-setup.{suffix}" for suffix in ("log", "stamps")]
PACKAGED = "hybridpipe/install/setup.sh"  # what `hybridpipe setup` runs
READ = [
    "pyproject.toml",
    "launch/setup",
    *(f"hybridpipe/{name}.py" for name in ("__init__", "errors", "version")),
]
READ += [
    f"hybridpipe/install/{name}"
    for name in ("setup.sh", "horovod.sh", "horovod.txt", "__init__.py", "bundle.py")
]
REQUIRED = ("--horovod", "required")
TOOLS = "awk bash cat cut df dirname env flock g++ grep head make mktemp paste rm sed sha256sum sort tail tr"

# Tests hide tools by leaving links out; what is not there cannot be linked.
MISSING = [tool for tool in TOOLS.split() if shutil.which(tool) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"there is no {', '.join(MISSING)}")


@pytest.fixture
def machine(tmp_path):
    """A checkout on a machine that has only what is linked into its bin folder."""
    for name in READ:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, tmp_path / name)
    bin = tmp_path / "bin"
    bin.mkdir()
    for tool in TOOLS.split():
        (bin / tool).symlink_to(shutil.which(tool))
    return tmp_path


def program(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def python_without(machine, word):
    """This Python, failing where it is asked for `word`."""
    lines = f'case "$2" in *{word}*) exit 1;; esac; exec {sys.executable} "$@"'
    return program(machine / "bin/python3", lines)


def refusal(machine, *arguments, script="launch/setup", **env):
    """What it says when it refuses: one line, and nothing was made."""
    before = sorted(machine.rglob("*"))
    env = {"PATH": str(machine / "bin"), "HOME": str(machine), "PYTHON": sys.executable} | env
    env = {name: value for name, value in env.items() if value}
    command = ["bash", machine / script, *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=30)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("setup: ") and done.stderr.count("\n") == 1, done.stderr
    assert sorted(machine.rglob("*")) == before
    return done.stderr


def test_an_old_python(machine):
    old = program(machine / "bin/python3", "[ $1 = -V ] && echo Python 3.9.2; exit 1")
    message = "needs Python 3.11 to 3.14, and {} is 'Python 3.9.2': set PYTHON=/path/to/python3.11"
    assert message.format(old) in refusal(machine, PYTHON=old)
    assert message.format("python3") in refusal(machine, PYTHON="")


def test_no_python(machine):
    assert "set PYTHON=/path/to/python3.11" in refusal(machine, PYTHON="")
    assert "set PYTHON=/path/to/python3.11" in refusal(machine, PYTHON="/nowhere/python3")


def test_no_venv_module(machine):
    python = program(
        machine / "bin/python3", f'case "$2" in *ensurepip*) exit 1;; esac; exec {sys.executable} "$@"'
    )
    assert "apt install python3-venv" in refusal(machine, PYTHON=python)


# ---- A build of Horovod that is required, and cannot be made ----------------------------------------------


def test_no_python_headers(machine):
    assert "apt install python3-dev" in refusal(
        machine, *REQUIRED, PYTHON=python_without(machine, "Python.h")
    )


def test_no_compiler(machine):
    (machine / "bin/g++").unlink()
    assert "no C++ compiler (g++): sudo apt install g++" in refusal(machine, *REQUIRED)


def test_an_old_compiler(machine):
    (machine / "bin/g++").unlink()
    program(machine / "bin/g++", "[ $1 = --version ] && echo g++ 8.3.0; exit 1")
    assert "g++ 8.3.0 knows no C++20: set CXX to g++ 10 or newer" in refusal(machine, *REQUIRED)


def test_no_make(machine):
    (machine / "bin/make").unlink()
    assert "no make: sudo apt install make" in refusal(machine, *REQUIRED)


@pytest.mark.parametrize("asked", ["--cuda nccl", "HOROVOD_GPU_OPERATIONS=NCCL"])
def test_a_build_with_cuda_that_was_asked_for_is_required(machine, asked):
    (machine / "bin/make").unlink()
    name, _, value = asked.partition("=")
    options, env = ([], {name: value}) if value else (asked.split(), {})
    assert "no make: sudo apt install make" in refusal(machine, *options, **env)


# ---- A Horovod that cannot be built, and need not be -------------------------------------------------------

INSTEAD = "training sums gradients by MPI instead"


def told(machine, words, **env):
    """What words of bash print, with the functions of set-up at hand and an environment in `machine`."""
    given = f"env={machine} here=yes start={machine} python={sys.executable}"
    asks = f"{given}; . {REPOSITORY / PACKAGED}; look_around; {words}"
    env = {"PATH": str(machine / "bin"), "HOME": str(machine), **env}
    done = subprocess.run(["bash", "-c", asks], env=env, capture_output=True, text=True, timeout=30)
    return done.stdout + done.stderr


def test_without_a_compiler_one_line_says_what_is_missing_and_what_is_used(machine):
    (machine / "bin/g++").unlink()
    said = told(machine, 'decide "$python"; horovod_is_there() { false; }; say_left_out; say_left_out')
    assert said.startswith("setup: Horovod is left out: no C++ compiler (g++): sudo apt install g++ make")
    assert said.count("\n") == 2 and said.endswith(f"; {INSTEAD}\n")


def test_a_horovod_that_is_there_stays_where_it_cannot_be_built(machine):
    (machine / "bin/make").unlink()
    said = told(machine, 'decide "$python"; horovod_is_there() { true; }; say_left_out')
    assert said.startswith("setup: Horovod stays as it is: no make: ")


def test_what_was_said_of_horovod_is_remembered(machine):
    (machine / "hybridpipe-setup.horovod").write_text("off\n")
    asks = 'decide "$python"; say_left_out; echo "$horovod, $left_out"'
    assert told(machine, asks) == "off, --horovod off\n"
    assert told(machine, f"take_option --horovod auto; {asks}") == "auto, \n"


def test_what_is_said_of_horovod_is_remembered_where_nothing_else_is_to_be_done(machine):
    done = "plain_key() { echo key; }; touch $stamps; decide $python; finished true; cat $horovod_choice"
    (machine / "bin/touch").symlink_to(shutil.which("touch"))
    assert told(machine, f"take_option --horovod off; {done}") == "off\n"


@pytest.mark.skipif(Path("/proc/driver/nvidia").exists(), reason="this machine has an NVIDIA driver")
def test_a_large_torch_is_told_of_unless_another_source_is_configured(machine):
    """pip's list was cut off once the source was found, so pip failed, and the source did not count."""
    asks = "torch_version() { false; }; extras=test; say_torch_is_large"
    env = {"PIP_CONFIG_FILE": "/dev/null"}
    expected = "setup: torch with CUDA takes 3 GB, and here is no NVIDIA driver: launch/setup --extras test"
    assert told(machine, asks, **env).startswith(expected)
    many = {f"PIP_OPTION_{number}": "x" * 100 for number in range(1000)}
    assert told(machine, asks, PIP_FIND_LINKS="/wheels", **env, **many) == ""


BUILD = """
choose_cuda() { CUDA=; }; check_cuda() { true; }; horovod_key() { echo Horovod for $torch; }
horovod_is_there() { false; }; is_built() { false; }; python=true
build_horovod() { echo begin; echo 'x.h:3: error: no type'; return 1; }
: >"$log"; torch=one; decide "$python"
stamped() { grep -qxF "$key" "$stamps"; }
"""


@pytest.fixture
def can_build(machine):
    for tool in ("touch", "wc"):
        (machine / "bin" / tool).symlink_to(shutil.which(tool))
    return "lacks() { :; }; " + BUILD


def test_a_build_that_fails_ends_nothing(machine, can_build):
    said = told(machine, can_build + 'add_horovod "Open MPI 5"; echo on', CXX="true").splitlines()
    assert said[0] == "on" and said[1].startswith("setup: building Horovod 0.28.1 against Open MPI 5")
    log = f"the whole story is in {machine}/hybridpipe-setup.log"
    assert said[2].startswith(f"setup: Horovod cannot be built: x.h:3: error: no type; {log}; {INSTEAD}")


def test_a_build_that_fails_is_an_error_where_it_is_required(machine, can_build):
    said = told(machine, f'horovod=required; {can_build} add_horovod "Open MPI 5"; echo on', CXX="true")
    assert "x.h:3: error: no type\nsetup: that failed; the whole story is in" in said and "on\n" not in said


def test_a_build_that_failed_is_not_tried_again_until_something_changes(machine, can_build):
    made = f'{can_build} add_horovod "Open MPI 5"; echo "$key" >"$stamps"; '
    assert told(machine, made + "finished stamped && echo finished", CXX="true").startswith("finished")
    for other in ("torch=two", "horovod=required", "export CUDA_HOME=/cuda"):
        said = told(machine, f"{made} {other}; finished stamped || echo again", CXX="true")
        assert said.startswith("again"), (other, said)


# ---- The rest ---------------------------------------------------------------------------------------------


def test_a_full_disk(machine):
    (machine / "bin/df").unlink()
    program(machine / "bin/df", "echo x; echo x 1 1 100 1 /")
    assert "less than 3 GB free" in refusal(machine)
    (machine / "bin/df").write_text("#!/bin/sh\necho x; echo x 1 1 8000 1 /\n")
    asks = "torch_version() { false; }; another_disk=elsewhere; say_torch_is_large"
    said = told(machine, asks, PIP_CONFIG_FILE="/dev/null")
    assert "less than 9 GB free" in said and "elsewhere, or launch/setup --torch cpu" in said
    assert told(machine, asks, PIP_FIND_LINKS="/wheels") == ""


def test_here_without_an_environment(machine):
    assert "--here needs an active environment" in refusal(machine, "--here", PYTHON="")


def test_unknown_options(machine):
    options = "--here, --system-site-packages, --extras test|examples, --torch cpu|cu126|ADDRESS, "
    options += "--horovod required|auto|off, --cuda off|staged|nccl, --from DIR"
    assert f"unknown option --there; allowed: {options}" in refusal(machine, "--there")
    assert "unknown extras 'docs'; allowed: test, examples" in refusal(machine, "--extras", "docs")
    assert "--cuda must be off, staged or nccl, got 'on'" in refusal(machine, "--cuda", "on")
    assert "--horovod must be required, auto or off, got 'no'" in refusal(machine, "--horovod", "no")
    assert "--cuda nccl and --horovod off contradict" in refusal(
        machine, "--cuda", "nccl", "--horovod", "off"
    )
    assert "--torch must be cpu, cu126 or another name" in refusal(machine, "--torch")
    assert "--torch: no folder './nowhere'" in refusal(machine, "--torch", "./nowhere")
    assert "--torch and --from contradict" in refusal(machine, "--torch", "cpu", "--from", ".")
    assert "--here and --system-site-packages contradict" in refusal(
        machine, "--here", "--system-site-packages"
    )
    assert "unknown option --there; allowed: --horovod" in refusal(
        machine, sys.executable, "--there", script=PACKAGED
    )


@pytest.mark.parametrize("folder", ["nowhere", ""])
def test_a_bundle_that_is_not_there(machine, folder):
    assert f"--from: no folder '{folder}': launch/bundle makes one" in refusal(machine, "--from", folder)


def test_a_folder_that_is_no_bundle(machine):
    (machine / "wheels").mkdir()
    expected = f"{machine}/bundle.json: No such file or directory: launch/bundle {machine} makes a bundle"
    assert expected in refusal(machine, "--from", str(machine))


def test_a_venv_that_does_not_see_the_site(machine):
    (machine / ".venv/bin").mkdir(parents=True)
    program(machine / ".venv/bin/python", f'exec {sys.executable} "$@"')
    assert ".venv was made without --system-site-packages" in refusal(machine, "--system-site-packages")


# ---- CUDA: what was asked for and cannot be built is refused ---------------------------------------------


@pytest.fixture
def torch_with(machine):
    """Make a torch of some CUDA, or of none, the one that Python finds; return the variables for that."""

    def make(cuda):
        site = machine / "site"
        (site / "torch-2.12.0.dist-info").mkdir(parents=True)
        (site / "torch-2.12.0.dist-info/METADATA").write_text("Name: torch\nVersion: 2.12.0\n")
        (site / "torch").mkdir()
        (site / "torch/version.py").write_text(f"cuda: Optional[str] = {cuda!r}\n")
        return {"PYTHONPATH": str(site)}

    return make


def cuda_refusal(machine, *options, **env):
    python = program(
        machine / "bin/python",
        f'case "$2" in *sys.prefix*) echo {machine}; exit;; esac; exec {sys.executable} -B "$@"',
    )
    return refusal(machine, python, *options, script=PACKAGED, **env)


@pytest.mark.parametrize("asked", ["--cuda nccl", "--cuda staged", "HOROVOD_GPU_OPERATIONS=NCCL"])
def test_cuda_that_torch_does_not_have(machine, torch_with, asked):
    name, _, value = asked.partition("=")
    options, env = ([], {name: value}) if value else (asked.split(), {})
    said = cuda_refusal(machine, *options, **torch_with(None), **env)
    assert f"torch 2.12.0 has no CUDA, and {asked} asks for it" in said


def test_no_compiler_for_an_old_cuda(machine, torch_with):
    said = cuda_refusal(machine, *REQUIRED, **torch_with("11.8"))
    assert "no nvcc of CUDA 11, which torch 2.12.0 has, and PyPI has compilers from 13 on only" in said
    assert "module load cuda/11" in said and "--cuda off" in said


def toolkit(machine, release, compiles="exit 0"):
    """A CUDA toolkit's nvcc as far as set-up asks it."""
    (machine / "cuda/bin").mkdir(parents=True)
    lines = f"*--version*) echo 'Cuda compilation tools, release {release}, V{release}.1';;"
    lines += f" *--dryrun*) echo '#$ TOP={machine}/cuda' >&2;; *) {compiles};;"
    program(machine / "cuda/bin/nvcc", f'case "$*" in {lines} esac')
    return {"CUDA_HOME": str(machine / "cuda")}


def test_a_toolkit_of_another_cuda(machine, torch_with):
    said = cuda_refusal(machine, *REQUIRED, **torch_with("13.0"), **toolkit(machine, "12.4"))
    assert f"no nvcc of CUDA 13, which torch 2.12.0 has, in CUDA_HOME={machine}/cuda" in said


def test_a_toolkit_that_does_not_take_this_compiler(machine, torch_with):
    too_new = "echo '#error: unsupported GNU version' >&2; exit 1"
    said = cuda_refusal(machine, *REQUIRED, **torch_with("13.0"), **toolkit(machine, "13.0", too_new))
    assert (
        f"nvcc of {machine}/cuda does not work with g++" in said and "#error: unsupported GNU version" in said
    )


def chosen(machine, torch_with, words, **env):
    """What `choose_cuda` says of these variables: torch's CUDA for a build with it, and NCCL."""
    given = f"python={sys.executable} choice={machine}/choice env={machine} here=yes start={machine}"
    asks = f"{given}; . {Path(__file__).parents[2] / PACKAGED}; {words}"
    told = asks + '; choose_cuda; echo "CUDA=$CUDA $(uses_nccl && echo nccl)"'
    env = {"PATH": os.environ["PATH"], "HOME": str(machine), **torch_with("13.0"), **env}
    done = subprocess.run(["bash", "-c", told], env=env, capture_output=True, text=True, timeout=30)
    return done.stdout.strip() or done.stderr


def test_off_is_off_whatever_a_module_has_set(machine, torch_with):
    assert chosen(machine, torch_with, "cuda=off", HOROVOD_GPU_OPERATIONS="NCCL") == "CUDA="


def test_a_finished_build_needs_no_compiler(machine, torch_with):
    """A shell without the CUDA module: nothing is to be built, so no nvcc is looked for."""
    built = "horovod_key() { echo built; }; is_built() { true; }; find_toolkit() { echo asked; }"
    assert chosen(machine, torch_with, f"{built}; choose_cuda; check_cuda") == "CUDA=13.0"


def test_a_bundle_without_the_compiler_that_is_needed(machine, torch_with):
    cuda = "99.0"  # no machine has it
    (machine / "wheels").mkdir()
    python = "{}.{}".format(*sys.version_info)
    platform = f"manylinux_2_5_{os.uname().machine}"
    manifest = bundle.BundleManifest(bundle.requirements(""), "", python, platform, without=[])
    (machine / "bundle.json").write_text(json.dumps(asdict(manifest)))
    said = cuda_refusal(machine, *REQUIRED, "--from", str(machine), **torch_with(cuda))
    assert f"{machine} has no compiler of CUDA {cuda}, and there is none here" in said


def test_no_nccl(machine, torch_with):
    if Path("/usr/include/nccl.h").exists():
        pytest.skip("this machine has NCCL")
    said = cuda_refusal(machine, "--cuda", "nccl", **torch_with("13.0"), **toolkit(machine, "13.0"))
    assert "no NCCL (nccl.h): pip install nvidia-nccl-cu13, or set HOROVOD_NCCL_HOME" in said


def test_another_python_than_that_of_the_venv(machine):
    (machine / ".venv/bin").mkdir(parents=True)
    program(machine / ".venv/bin/python", "[ $1 = -V ] && echo Python 3.12.0; exit 0")
    assert "rm -r .venv to change it" in refusal(machine)


@pytest.mark.parametrize(
    "missing, message",
    [
        ("make", "no make: sudo apt install make"),
        ("g++", "no C++ compiler (g++): sudo apt install g++ make"),
        ("pip", "has no pip: "),
    ],
)
def test_the_command_refuses_in_the_same_words(machine, missing, message):
    (machine / "bin" / missing).unlink(missing_ok=True)
    lines = f"*sys.prefix*) echo {machine}; exit;; {missing}) exit 1;;"
    python = program(machine / "bin/python", f'case "$2" in {lines} esac; exec {sys.executable} "$@"')
    assert message in refusal(machine, python, *REQUIRED, script=PACKAGED)


# ---- Horovod's sources ------------------------------------------------------------------------------------


def horovod_sh(words, **env):
    """Run functions of horovod.sh, beside a Python whose pip has no index."""
    script = f"scripts={REPOSITORY}; . {REPOSITORY}/hybridpipe/install/horovod.sh; {words}"
    env = {"PATH": os.environ["PATH"], "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull} | env
    return subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True, timeout=60)


def test_another_archive_is_refused_before_anything_of_it_runs(tmp_path):
    """pip asks a source for its name, so a hash that is compared after the download comes too late."""
    ran, sources = tmp_path / "ran", tmp_path / "index/horovod-0.28.1"
    sources.mkdir(parents=True)
    (sources / "setup.py").write_text(f"open({str(ran)!r}, 'w')\n")
    (sources / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: horovod\nVersion: 0.28.1\n")
    shutil.make_archive(str(sources), "gztar", sources.parent, sources.name)
    (tmp_path / "venv/bin").mkdir(parents=True)
    program(tmp_path / "venv/bin/python", f'exec {sys.executable} "$@"')
    done = horovod_sh(f"get_horovod {tmp_path}", PIP_FIND_LINKS=sources.parent.as_uri())
    assert done.returncode == 1 and not ran.exists()
    expected = (
        "error: pip finds no source of Horovod 0.28.1 with the hash in horovod.txt: choose another index"
    )
    assert [line for line in done.stdout.splitlines() if "error:" in line][-1].startswith(expected)
    assert "DO NOT MATCH THE HASHES" in done.stderr


def test_sources_that_forgot_a_standard_header_compile(tmp_path):
    """group_table.h names std::string, which from g++ 13 on no other header of it brings."""
    lines = {
        "CMakeLists.txt": "cmake_minimum_required(VERSION 3.13)\nset(CMAKE_CXX_STANDARD 14)\n"
        'set(CMAKE_CXX_FLAGS "${CMAKE_CXX_FLAGS} -pthread -fPIC -Wall -ftree-vectorize")\n',
        "third_party/flatbuffers/include/flatbuffers/stl_emulation.h": "typedef int size_type;\n"
        "struct span {\n  void assign(const span &other) { count_ = other.count_; }\n"
        "  const size_type count_;\n};\n",
        "horovod/runner/js_run.py": "from distutils.spawn import find_executable\n",
    }
    others = ["torch/CMakeLists.txt", "common/ops/cuda/CMakeLists.txt", "torch/cuda_util.cc"]
    lines |= {f"horovod/{name}": "" for name in others} | {"cmake/Modules/FindPytorch.cmake": ""}
    for name, text in lines.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "group_table.cc").write_text("std::string name; std::uint32_t number;\n#include SPAN\n")
    done = horovod_sh(f"cd {tmp_path} && CUDA= && patch_horovod")
    assert done.returncode == 0, done.stderr
    cmake = (tmp_path / "CMakeLists.txt").read_text()
    flags = re.search(r"CMAKE_CXX_FLAGS\} (.*)\"", cmake)[1].split()
    standard = re.search(r"CMAKE_CXX_STANDARD (\d+)", cmake)[1]
    header = tmp_path / "third_party/flatbuffers/include/flatbuffers/stl_emulation.h"
    command = ["g++", f"-std=c++{standard}", *flags, f'-DSPAN="{header}"']
    compiled = subprocess.run(
        [*command, "-fsyntax-only", tmp_path / "group_table.cc"], capture_output=True, text=True, timeout=60
    )
    assert compiled.returncode == 0, compiled.stderr
    assert "distutils" not in (tmp_path / "horovod/runner/js_run.py").read_text()


@pytest.mark.skipif(Path(sys.prefix) != REPOSITORY / ".venv", reason="not in launch/setup's .venv")
def test_the_second_run_does_nothing_and_names_the_python():
    command, env = [REPOSITORY / "launch/setup", "--extras", "test"], dict(os.environ)
    env.pop("PYTHON", None)
    subprocess.run(command, env=env, check=True, capture_output=True, timeout=100)
    written = [path.stat().st_mtime_ns for path in SETUP_WRITES]
    done = subprocess.run(command, env=env, check=True, capture_output=True, text=True, timeout=100)
    assert [path.stat().st_mtime_ns for path in SETUP_WRITES] == written
    assert (done.stdout, done.stderr) == (f"{REPOSITORY}/.venv/bin/python\n", "")
