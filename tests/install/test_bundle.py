"""Bundles: what set-up takes from a folder instead of an index; what does not fit is refused first."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from hybridpipe.errors import UserError
from hybridpipe.install import bundle

PYTHON = bundle.HERE
OTHER_PYTHON = "3.12" if PYTHON == "3.11" else "3.11"
ROOT = bundle.PROJECT.parent
MACHINE = bundle.PLATFORM.split("_", 3)[3]


def wheel(folder, name, *requires):
    """A wheel with a module of its name, and its metadata."""
    package, version = name.split("-")[:2]
    path = folder / f"{name}.whl"
    lines = [f"Name: {package}", f"Version: {version}", *(f"Requires-Dist: {each}" for each in requires)]
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{package}.py", "")
        archive.writestr(f"{package}-{version}.dist-info/METADATA", "\n".join(lines) + "\n")
        archive.writestr(
            f"{package}-{version}.dist-info/WHEEL",
            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr(f"{package}-{version}.dist-info/RECORD", "")
    return path


@pytest.fixture
def made(tmp_path):
    """A bundle of two wheels that fits this machine: its folder, and a function that changes its manifest."""
    folder = tmp_path / "a bundle"
    wheels = folder / "wheels"
    wheels.mkdir(parents=True)
    wheel(wheels, "first-1.0-py3-none-any")
    wheel(wheels, "second-2.0-py3-none-any", "first")
    manifest = bundle.BundleManifest(
        requirements=bundle.requirements(""),
        extras="",
        python=PYTHON,
        platform=f"manylinux_2_5_{MACHINE}",
        without=[],
    )

    def write(**changes):
        (folder / bundle.MANIFEST).write_text(json.dumps(asdict(replace(manifest, **changes))))
        return folder

    write()
    return write


def refused(folder, *words, **options):
    with pytest.raises(UserError) as caught:
        bundle.check(folder, **options)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


# ---- Checking ---------------------------------------------------------------------------------------------


def test_a_bundle_that_fits(made):
    bundle.check(made())


def test_a_bundle_for_another_python(made):
    told = f"is for Python {OTHER_PYTHON}, and this is {PYTHON}: remove it, then PYTHON=python{PYTHON} "
    refused(made(python=OTHER_PYTHON), told, "launch/bundle ")


def test_a_bundle_for_a_newer_system_or_another_machine(made):
    newer = f"manylinux_2_99_{MACHINE}"
    refused(
        made(platform=newer),
        f"is for {newer}, and this is manylinux_2_",
        f"_{MACHINE}: remove it, then PYTHON=python",
    )
    refused(made(platform="manylinux_2_5_ppc64le"), "is for manylinux_2_5_ppc64le")


def test_extras_that_were_not_bundled(made):
    refused(made(), "has no extras 'test'", "--extras test", extras="test")
    covered = {"extras": "test", "requirements": bundle.requirements("test")}
    for extras in ("", "examples", "test"):
        bundle.check(made(**covered), extras=extras)


def test_a_bundle_of_another_hybridpipe(made):
    refused(made(requirements=["torch<2"]), "is for another hybridpipe, with other requirements")


def test_what_is_left_out_must_be_there(made):
    bundle.check(made(without=["torch"]))
    refused(made(without=["torch"]), "leaves out torch, which a new .venv will not see", bare=True)
    refused(
        made(without=["no-such-package"]), "leaves out no-such-package", "has none: load the site's module"
    )
    lines = [f"{line}=={'0.1'}" if line == "numpy" else line for line in bundle.requirements("")]
    with pytest.raises(UserError, match=r"leaves out numpy, and .* not numpy==0\.1"):
        bundle._check_left_out(Path("bundle.json"), "numpy", lines, bare=False)


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"format": "hybridpipe-bundle/2"}', '{"format": "hybridpipe-bundle/1"}']
)
def test_a_manifest_that_is_none(tmp_path, text):
    (tmp_path / bundle.MANIFEST).write_text(text)
    refused(tmp_path, "is no hybridpipe-bundle/1: make the bundle again")


# ---- Making -----------------------------------------------------------------------------------------------


def test_requirements_are_those_of_the_project():
    assert bundle.requirements("")[0].startswith("torch>=")
    assert set(bundle.requirements("examples")) == {*bundle.requirements(""), "scikit-learn", "transformers"}
    assert {"pytest", "transformers", "tensorboard"} < set(bundle.requirements("test"))


def test_tags_of_older_systems_follow():
    tags = bundle.tags("manylinux_2_17_x86_64")
    assert tags[:3] == ["manylinux_2_17_x86_64", "manylinux2014_x86_64", "manylinux_2_16_x86_64"]
    assert tags[-1] == "linux_x86_64"
    with pytest.raises(UserError, match="--platform must be manylinux_2_N_MACHINE"):
        bundle.tags("linux")


@pytest.mark.parametrize(
    "words, message",
    [
        (["--extras", "docs"], "invalid choice: 'docs'"),
        (["--platform", "win32"], "bundle: --platform must be manylinux_2_N_MACHINE"),
        (["--platform", "manylinux_2_28_sparc"], f"is for sparc, and this is {MACHINE}: make it on such a"),
        ([], "is there already: remove it, or name another folder"),
    ],
)
def test_mistakes_are_told_before_anything_is_downloaded(tmp_path, words, message):
    command = [ROOT / "launch/bundle", tmp_path, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr and list(tmp_path.iterdir()) == []


# ---- Installing from one, without a network ----------------------------------------------------------------

OFFLINE = ["unshare", "--map-root-user", "--net"]


@pytest.fixture
def offline():
    """The words before a command that has no network, not even the loopback."""
    if subprocess.run([*OFFLINE, "true"], capture_output=True).returncode:
        pytest.skip("needs unshare, and a kernel that makes network namespaces for this user")
    return OFFLINE


def install(made, offline, tmp_path, package):
    """Install a package as set-up does; pip and what it starts see what check_bundle has exported."""
    code = f"""
        python={sys.executable} here=yes start=$PWD; . hybridpipe/install/setup.sh
        take_option --from '{made()}'; check_bundle $python
        $python -m pip install --target {tmp_path}/site {package}"""
    env = {**os.environ, "PIP_INDEX_URL": "https://nowhere.invalid/simple"}
    return subprocess.run(
        [*offline, "bash", "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, timeout=60
    )


def test_pip_takes_a_package_and_what_it_needs_from_the_bundle(made, offline, tmp_path):
    done = install(made, offline, tmp_path, "second")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site/first.py").exists() and (tmp_path / "site/second.py").exists()


def test_pip_looks_nowhere_else(made, offline, tmp_path):
    done = install(made, offline, tmp_path, "tabulate")
    assert done.returncode == 1 and "No matching distribution found for tabulate" in done.stderr
    assert "nowhere.invalid" not in done.stdout + done.stderr


TRAINING = """
import torch, hybridpipe
from functools import partial
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randn(32, 2))
trainer = hybridpipe.Trainer(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2)),
    loss=torch.nn.functional.mse_loss, optimizer=partial(torch.optim.SGD, lr=0.1),
    plan="dp", minibatch_size=8)
trainer.fit(data, epochs=1)
print(trainer.evaluate(data))
"""


@pytest.mark.netcluster
@pytest.mark.timeout(1200)
def test_a_cluster_without_a_network_sets_up_and_trains(offline, tmp_path):
    """The torch is this environment's, as a site's would be; Horovod is built if no earlier set-up has."""
    env = {
        **os.environ,
        "PYTHON": sys.executable,
        "VIRTUAL_ENV": sys.prefix,  # as activated: its MPI is not taken for the machine's
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    env.pop("PYTHONPATH", None)  # the clone's package is meant
    folder = tmp_path / "bundle"
    made = subprocess.run(
        [ROOT / "launch/bundle", folder, "--without", "torch,numpy"], env=env, capture_output=True, text=True
    )
    assert made.returncode == 0, made.stderr
    clone = tmp_path / "clone"
    shutil.copytree(ROOT, clone, ignore=shutil.ignore_patterns(".venv", ".git", "runs"))

    def alone(*words):
        words = [*offline, "sh", "-c", 'ip link set lo up; exec "$@"', "-", *words]
        return subprocess.run(words, cwd=clone, env=env, capture_output=True, text=True)

    done = alone("launch/setup", "--system-site-packages", "--from", str(folder))
    assert done.returncode == 0, done.stderr
    python = done.stdout.strip()
    (tmp_path / "train.py").write_text(TRAINING)
    job = [python, "-m", "hybridpipe.launch.mpirun", "2", "--", python]
    checked = alone(*job, "-m", "hybridpipe", "doctor")
    assert checked.returncode == 0, checked.stdout
    assert "horovod and mpi averaged over 2 ranks" in checked.stdout, checked.stdout
    trained = alone(*job, str(tmp_path / "train.py"))
    assert trained.returncode == 0 and trained.stdout.count("loss") == 2, trained.stderr
