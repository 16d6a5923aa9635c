"""Runs a benchmark: `python benchmarks/run.py NAME [options]`; without a name it lists them.

A benchmark is a module of cases/ with `measure(run)`, which yields the rows of one round, and `report(rows)`,
which returns Markdown of all rows. It may have `picture(rows)` and `add_options(parser)`.

A run writes DIR/NAME.json, the rows; DIR/NAME.md, the tables with the command, commit and date; and
DIR/NAME.svg if there is a picture. Rounds of later calls with the same DIR are added to the earlier ones.
"""

import argparse
import ast
import importlib
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from types import ModuleType

import bootstrap

if __name__ == "__main__":
    bootstrap.enter(sys.argv[1:])  # before anything that the environment has to have

import networks
import results
from jobs import Run

CASES = Path(__file__).parent / "cases"


def names() -> list[str]:
    """Return the names of all benchmarks."""
    return sorted(path.stem for path in CASES.glob("*.py"))


def case(name: str) -> ModuleType:
    """Import the module of a benchmark."""
    return importlib.import_module(f"cases.{name}")


def listing() -> str:
    """Return a line for each benchmark from its docstring, without importing it."""
    documents = {name: ast.get_docstring(ast.parse((CASES / f"{name}.py").read_text())) for name in names()}
    return "\n".join(
        f"  {name:14} {(text or '').splitlines()[0].partition(': ')[2]}" for name, text in documents.items()
    )


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments: a benchmark's name, and its options."""
    chooser = argparse.ArgumentParser(
        usage="python benchmarks/run.py NAME [options]",
        epilog=f"{listing()}\n\npython benchmarks/run.py NAME --help lists its options.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    chooser.add_argument("name", metavar="NAME", choices=names())
    if not arguments:
        chooser.print_help()
        raise SystemExit(0)
    name = chooser.parse_args(arguments[:1]).name
    return options_of(name).parse_args(arguments[1:], argparse.Namespace(name=name))


def options_of(name: str) -> argparse.ArgumentParser:
    """Return the parser of a benchmark: the options of all benchmarks and its own."""
    module = case(name)
    parser = argparse.ArgumentParser(
        prog=f"python benchmarks/run.py {name}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--out", type=Path, metavar="DIR", default=Path("runs") / name)
    add("--rounds", type=int, metavar="N", default=1, help="rounds to measure; 0: report on the rows in DIR")
    only = 'measure only rows whose "GROUP: WAY" matches; given twice, both have to match'
    add("--only", action="append", metavar="REGEX", default=[], help=only)
    add("--netcluster", type=Path, metavar="PATH", default=networks.NETCLUSTER, help="makes hosts, as root")
    if hasattr(module, "add_options"):
        module.add_options(parser)
    return parser


def commit() -> str:
    """Return the commit of this checkout, with a note if files differ from it."""

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(networks.ROOT), *words], capture_output=True, text=True
        ).stdout.strip()

    changes = " with changes" if git("diff", "--name-only", "HEAD") else ""
    return git("rev-parse", "--short", "HEAD") + changes


def main(arguments: Sequence[str]) -> None:
    """Measure, write the results and print them."""
    options = parse(arguments)
    module = case(options.name)
    draws = hasattr(module, "picture")
    if draws:
        results.require_matplotlib()
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    file = out / f"{options.name}.json"
    runs, rows = results.read(file)
    if options.rounds:
        runs.append(
            {
                "command": shlex.join(["python", "benchmarks/run.py", *arguments]),
                "commit": commit(),
                "date": date.today().isoformat(),
                "machine": f"{os.cpu_count()} cores",
            }
        )
    first = 1 + max((row.round for row in rows), default=-1)
    for number in range(first, first + options.rounds):
        for row in module.measure(Run(out, number, options)):
            rows.append(replace(row, load=os.getloadavg()[0]))
            print(row, flush=True)
            results.write(file, runs, rows)
    if not rows:
        raise SystemExit(f"{options.name}: nothing was measured")
    told = [f"`{run['command']}`, {run['date']}, {run['commit']}, {run['machine']}" for run in runs]
    told.append(f"load of the machine: {max(row.load for row in rows):.1f} at most")
    text = "\n\n".join([module.report(rows), "  \n".join(told)])
    (out / f"{options.name}.md").write_text(f"{text}\n")
    if draws:
        module.picture(rows).savefig(out / f"{options.name}.svg", metadata={"Date": None})
    print(f"\n{text}\n\nwritten to {out}")


if __name__ == "__main__":
    main(sys.argv[1:])
