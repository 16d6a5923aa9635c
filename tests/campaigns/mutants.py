"""Mutants: one small change of the package at a time, and the nearest tests, which should notice it.

    pip install cosmic-ray coverage
    python -m tests.campaigns.mutants --count 300 --seed 0
    python -m tests.campaigns.mutants --count 60 --only 'hybridpipe/stage/*'

A seed draws the mutants from all that the operators below can make in the modules of mutants.toml, which
also names each module's tests and the mutants known to be the same program. Tests run on a copy of the tree,
without MPI: first all, under coverage; then, for a mutant, those that run its line, until one fails. A line
that no test runs counts as unnoticed.

cosmic-ray gives the operators only: it draws no sample, and has one test command for all modules. mutmut
(3.8) draws none either, and leaves modules' constants alone.
"""

import argparse
import ast
import compileall
import functools
import json
import multiprocessing
import os
import py_compile
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import coverage
import hypothesis
import pytest
import torch
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator
from tabulate import tabulate

ROOT = Path(__file__).parents[2]
TABLE = tomllib.loads(Path(__file__).with_name("mutants.toml").read_text())
COMPARISONS = "Lt_LtE LtE_Lt Gt_GtE GtE_Gt Eq_NotEq NotEq_Eq Is_IsNot IsNot_Is"
ARITHMETIC = "Add_Sub Sub_Add Mul_Add Div_Mul FloorDiv_Mul Mod_FloorDiv Pow_Mul"
OPERATORS = [
    *(f"ReplaceComparisonOperator_{name}" for name in COMPARISONS.split()),
    *(f"ReplaceBinaryOperator_{name}" for name in ARITHMETIC.split()),
    *("NumberReplacer", "AddNot", "ReplaceUnaryOperator_Delete_Not", "ReplaceAndWithOr", "ReplaceOrWithAnd"),
]
PYTEST = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=line")
FORK = multiprocessing.get_context("fork")


@functools.cache
def text_of(module: str) -> str:
    """Read once: the tree may change while a campaign runs."""
    return (ROOT / module).read_text()


@dataclass(frozen=True)
class Mutant:
    module: str
    line: int
    operator: str
    occurrence: int

    @property
    def source(self) -> str:
        operator = get_operator(f"core/{self.operator}")()
        return mutate_code(text_of(self.module), operator, self.occurrence)

    @property
    def change(self) -> tuple[str, str]:
        """The first line that differs, before and after."""
        lines = zip(text_of(self.module).splitlines(), self.source.splitlines())
        was, became = next((was, became) for was, became in lines if was != became)
        return " ".join(was.split()), " ".join(became.split())

    @property
    def is_program(self) -> bool:
        try:
            return bool(compile(self.source, self.module, "exec"))
        except SyntaxError:
            return False


def mutants_of(module: str) -> list[Mutant]:
    tree = get_ast(text_of(module))
    found = []
    for name in OPERATORS:
        operator = get_operator(f"core/{name}")()
        places = [(node, start) for node in ast_nodes(tree) for start, _ in operator.mutation_positions(node)]
        for occurrence, (node, (line, _)) in enumerate(places):
            if name != "NumberReplacer" or node.value in "0123456789":  # larger numbers and floats are tuned
                found.append(Mutant(module, line, name, occurrence))
    return found


def squeezed(module: str, was: str, became: str) -> tuple[str, str, str]:
    """A change as a key: cosmic-ray leaves blanks beside what it puts in."""
    return module, bare(was), bare(became)


def bare(line: str) -> str:
    """A line without blanks and comment."""
    return re.sub(r"\s+#.*", "", line).replace(" ", "")


@functools.cache
def files_of(module: str) -> list[str]:
    """The test files of the module's row; the file named like the module comes first."""
    patterns = next(row["tests"] for row in TABLE["row"] if fnmatch(module, row["modules"]))
    files = [file for pattern in patterns for file in sorted(ROOT.glob(pattern))]
    files.sort(key=lambda file: file.stem != f"test_{Path(module).stem}")
    return [str(file.relative_to(ROOT)) for file in files]


def lines_in_function(module: str, line: int) -> range | None:
    """The lines of the innermost statement around a line; the head only of one that holds others.

    None outside of functions, where imports run it.
    """
    statements = (node for node in ast.walk(ast.parse(text_of(module))) if isinstance(node, ast.stmt))
    around = sorted((n for n in statements if n.lineno <= line <= n.end_lineno), key=lambda n: n.lineno)
    if not any(isinstance(node, ast.FunctionDef) and node.body[0].lineno <= line for node in around):
        return None
    body = getattr(around[-1], "body", None)
    end = body[0].lineno - 1 if body else around[-1].end_lineno
    return range(around[-1].lineno, max(line, end) + 1)


def tests_of(
    mutant: Mutant, seconds: dict[str, float], runners: dict[str, dict[str, list[str]]]
) -> list[str]:
    """The tests that run the mutant's statement, nearest first and the quickest of those.

    A statement that imports run, a constant's, can matter to every test of the module's row.
    """
    files, lines = files_of(mutant.module), lines_in_function(mutant.module, mutant.line)
    of_line = runners.get(mutant.module, {})
    running = None if lines is None else {test for i in lines for test in of_line.get(str(i), ())}
    near = [test for test in seconds if test.partition("::")[0] in files and (not lines or test in running)]
    return sorted(near, key=lambda test: (files.index(test.partition("::")[0]) > 0, seconds[test]))


class Watcher:
    """A plugin of pytest: tells coverage which test runs, its parameters aside, and takes the time."""

    def __init__(self) -> None:
        self.coverage = coverage.Coverage(data_file=None, source=["hybridpipe"], config_file=False)
        self.seconds: Counter[str] = Counter()
        self.failed: set[str] = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        test, started = item.nodeid.partition("[")[0], time.monotonic()
        self.coverage.switch_context(test)
        result = yield
        self.coverage.switch_context("")
        self.seconds[test] += time.monotonic() - started
        return result

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.failed.add(report.nodeid.partition("[")[0])


def make_copy(parent: Path) -> None:
    """Makes this worker's copy of the tree, and goes there."""
    os.chdir(tempfile.mkdtemp(dir=parent))
    listed = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True)
    for file in listed.splitlines():
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / file, file)
    # Bytecode is told by its source's hash: a mutant can have its module's length and be of the same second.
    compileall.compile_dir(
        "hybridpipe", quiet=2, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH
    )


def run_pytest(tests: list[str], *plugins: object) -> int:
    """Runs tests of this copy, quietly, in a process that has just been forked. Returns pytest's status."""
    os.setsid()
    sys.path[:] = [os.getcwd(), *(path for path in sys.path if Path(path).resolve() != ROOT)]
    for name in [name for name in sys.modules if name.split(".")[0] in ("hybridpipe", "tests")]:
        del sys.modules[name]
    os.environ |= {"PYTHONPATH": os.getcwd(), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    torch.set_num_threads(1)
    hypothesis.settings.register_profile("mutants", database=None, derandomize=True)
    hypothesis.settings.load_profile("mutants")
    output = os.open("output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    return pytest.main([*PYTEST, *tests], plugins=plugins)


def run(tests: list[str]) -> None:
    os._exit(run_pytest(["-x", *tests]))


def run_watched(tests: list[str]) -> None:
    watcher = Watcher()
    watcher.coverage.start()
    status = run_pytest(tests, watcher)
    watcher.coverage.stop()
    data = watcher.coverage.get_data()
    runners = {os.path.relpath(file): data.contexts_by_lineno(file) for file in data.measured_files()}
    Path("watched.json").write_text(json.dumps([watcher.seconds, runners, sorted(watcher.failed)]))
    os._exit(0 if status == 1 else status)


def in_process(function: Callable[[list[str]], None], tests: list[str], limit: float) -> str:
    """The test that failed, or what else went wrong; "" if nothing did."""
    process = FORK.Process(target=function, args=(tests,))
    process.start()
    process.join(limit)
    if process.is_alive():
        os.killpg(process.pid, signal.SIGKILL)
        process.join()
        return f"no end within {limit:.0f} s"
    lines = Path("output.txt").read_text(errors="replace").splitlines()
    failed = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
    return "" if process.exitcode == 0 else failed[0] if failed else f"exit {process.exitcode}"


def watch(tests: list[str]) -> str:
    """The tests' seconds, the tests that run each line, and those that fail without a mutant, as JSON."""
    failed = in_process(run_watched, tests, 3600)
    return f"without a mutant: {failed}" if failed else Path("watched.json").read_text()


def noticed(mutant: Mutant, tests: list[str], limit: float) -> tuple[str, float]:
    """What noticed the mutant, and the seconds that it took."""
    started = time.monotonic()
    Path(mutant.module).write_text(mutant.source)
    by = in_process(run, tests, limit) if tests else ""
    Path(mutant.module).write_text(text_of(mutant.module))
    return by, time.monotonic() - started


def draw(
    count: int, seed: int, only: str, same: set[tuple[str, str, str]]
) -> tuple[list[Mutant], list[Mutant]]:
    """Mutants, and those drawn with them that are the same program."""
    modules = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "hybridpipe").rglob("*.py"))]
    modules = [name for name in modules if any(fnmatch(name, row["modules"]) for row in TABLE["row"])]
    drawn = [mutant for name in modules if fnmatch(name, only) for mutant in mutants_of(name)]
    random.Random(seed).shuffle(drawn)
    mutants: list[Mutant] = []
    equivalent: list[Mutant] = []
    for mutant in drawn:
        if len(mutants) < count and mutant.is_program:
            (equivalent if squeezed(mutant.module, *mutant.change) in same else mutants).append(mutant)
    return mutants, equivalent


def watch_all(
    pool: ProcessPoolExecutor, mutants: list[Mutant], jobs: int
) -> tuple[dict[str, float], dict[str, dict[str, list[str]]]]:
    """The seconds of each test near the mutants, and the tests that run each line of each module."""
    seconds: dict[str, float] = {}
    runners: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    files = sorted({file for mutant in mutants for file in files_of(mutant.module)})
    for text in pool.map(watch, [files[i::jobs] for i in range(min(jobs, len(files)))]):
        if not text.startswith("["):
            sys.exit(text)
        of_some, lines, failed = json.loads(text)
        for test in failed:
            print(f"left out, as it fails without a mutant: {test}", flush=True)
        seconds |= {test: took for test, took in of_some.items() if test not in failed}
        for module, of_line in lines.items():
            for line, tests in of_line.items():
                runners[module][line] += tests
    return seconds, runners


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.mutants")
    parser.add_argument("--count", type=int, default=300, help="mutants; default: 300")
    parser.add_argument("--seed", type=int, default=0, help="which; default: 0")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="modules, as hybridpipe/stage/*")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time; default: 1")
    options = parser.parse_args()
    named = TABLE["equivalent"]
    reasons = {squeezed(row["module"], row["was"], row["became"]): row["reason"] for row in named}
    mutants, equivalent = draw(options.count, options.seed, options.only, set(reasons))
    total, seen = Counter[str](), Counter[str]()
    with tempfile.TemporaryDirectory() as parent:
        pool = ProcessPoolExecutor(options.jobs, FORK, make_copy, (Path(parent),))
        seconds, runners = watch_all(pool, mutants, options.jobs)
        jobs = []
        for mutant in mutants:
            tests = tests_of(mutant, seconds, runners)
            limit = 60 + 4 * sum(seconds[test] for test in tests)  # other programs share the cores
            jobs.append(pool.submit(noticed, mutant, tests, limit))
        for mutant, job in zip(mutants, jobs):
            by, took = job.result()
            package = str(Path(mutant.module).parent)
            total[package] += 1
            seen[package] += bool(by)
            print(f"{took:4.0f} s  {mutant.module}:{mutant.line}  {by or 'NOT NOTICED'}", flush=True)
            if not by:
                print("        - {}\n        + {}".format(*mutant.change), flush=True)
        pool.shutdown()
    found = [(name, seen[name], total[name], f"{seen[name] / total[name]:.0%}") for name in sorted(total)]
    found.append(("all", seen.total(), total.total(), f"{seen.total() / total.total():.0%}"))
    print(tabulate(found, ("package", "noticed", "mutants", "")))
    for mutant in equivalent:
        was, became = mutant.change
        print(f"the same program: {mutant.module}: {was} → {became}: ", end="")
        print(reasons[squeezed(mutant.module, was, became)])
    for module, was, _ in reasons:
        if was not in "\n".join(map(bare, text_of(module).splitlines())):
            print(f"mutants.toml names a line that is gone: {module}: {was}")


if __name__ == "__main__":
    main()
