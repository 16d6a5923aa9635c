"""Bundles: all wheels and sources of a set-up in one folder with a manifest, for machines without an index.

Standard library and pip only, because it runs before anything is installed; torch and MPI are not known here.
Invariant: a folder with a manifest is complete, and a bundle that does not fit is refused before it is used.
"""

import argparse
import importlib
import json
import platform
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from hybridpipe.errors import UserError

FORMAT = "hybridpipe-bundle/1"
MANIFEST = "bundle.json"
HOROVOD = Path(__file__).with_name("horovod.txt")
PROJECT = Path(__file__).parents[2] / "pyproject.toml"
LEGACY = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}  # names by glibc 2.N, before PEP 600


@dataclass(frozen=True)
class BundleManifest:
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

    def expanded(lines: Iterable[str]) -> Iterator[str]:
        for line in lines:
            if inner := re.fullmatch(r"hybridpipe\[([\w,]+)\]", line):
                for extra in inner[1].split(","):
                    yield from expanded(named[extra])
            else:
                yield line

    return tuple(expanded(project["dependencies"] + (named[extras] if extras else [])))


def horovod_lines() -> tuple[str, list[str]]:
    """Return Horovod's requirement line, with its hash, and those of what it and its build need."""
    lines = [line for line in HOROVOD.read_text().splitlines() if not line.startswith("#")]
    return lines[0], lines[1:]


def tags(newest: str) -> list[str]:
    """Return the platform tags of wheels that run on a platform, newest first.

    Raises:
        UserError: the platform is not manylinux_2_N_MACHINE.
    """
    minor, machine = glibc_and_machine(newest)
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


def glibc_and_machine(text: str) -> tuple[int, str]:
    """Return N and MACHINE of a platform's name. Raises UserError if it is not manylinux_2_N_MACHINE."""
    found = re.fullmatch(r"manylinux_2_(\d+)_(\w+)", text)
    if found is None:
        raise UserError(
            f"bundle: --platform must be manylinux_2_N_MACHINE, such as {this_platform()}, got {text!r}"
        )
    return int(found[1]), found[2]


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
        found = json.loads(path.read_text())
        if found.pop("format") != FORMAT:
            raise ValueError
        return BundleManifest(**{field.name: found[field.name] for field in fields(BundleManifest)})
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
    found, path, again = read(folder), folder / MANIFEST, f"remove it, then launch/bundle {folder}"
    python, here = f"{sys.version_info[0]}.{sys.version_info[1]}", this_platform()
    if found.python != python:
        raise UserError(
            f"{path}: is for Python {found.python}, and this is {python}: {again} --python {python}"
        )
    (glibc, machine), (glibc_here, machine_here) = glibc_and_machine(found.platform), glibc_and_machine(here)
    if machine != machine_here or glibc > glibc_here:
        raise UserError(f"{path}: is for {found.platform}, and this is {here}: {again} --platform {here}")
    covered = {"test": ("", "examples", "test"), "examples": ("", "examples")}.get(found.extras, ("",))
    if extras not in covered:
        raise UserError(f"{path}: has no extras {extras!r}: {again} --extras {extras}")
    if PROJECT.is_file() and tuple(found.requirements) != requirements(found.extras):
        raise UserError(f"{path}: is for another hybridpipe, with other requirements: {again}")
    for name, size in found.files.items():
        file = folder / "wheels" / name
        if not file.is_file():
            raise UserError(f"{path}: wheels/{name} is missing: copy the folder again, or {again}")
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
        if package_name(line) == name and not parsed(line).specifier.contains(have, prereleases=True):
            raise UserError(f"{path}: leaves out {name}, and {sys.executable} has {have}, not {line}")


# ---- Command line ----------------------------------------------------------------------------------------


def _python(text: str) -> str:
    if text not in ("3.11", "3.12", "3.13", "3.14"):
        raise argparse.ArgumentTypeError(f"must be 3.11 to 3.14, got {text!r}")
    return text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="launch/bundle")
    commands = parser.add_subparsers(required=True, dest="command")
    make = commands.add_parser(
        "make", prog="launch/bundle", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    make.add_argument("folder", metavar="DIR", type=Path, help="the folder to make")
    here = f"{sys.version_info[0]}.{sys.version_info[1]}"
    make.add_argument("--python", type=_python, default=here, help="3.11 to 3.14, as where it is used")
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
        from hybridpipe.install.download import make

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
