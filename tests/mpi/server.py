"""A rank of a world that runs one program after the other: started by mpirun, told by `worlds`.

Knows programs by their paths only. Invariant: a program finds what a process of its own would find:
arguments, environment, the package's constants, torch's settings and seed.
"""

import gc
import json
import os
import random
import runpy
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mpi4py import MPI

import hybridpipe.training.trainer  # noqa: F401  before the first program

Constants = dict[str, dict[str, Any]]


def _constants() -> Constants:
    """Return what the names of the package's modules stand for."""
    return {name: dict(vars(module)) for name, module in sys.modules.items() if name.startswith("hybridpipe")}


@contextmanager
def _as_in_a_process_of_its_own(program: str, arguments: list[str]) -> Iterator[None]:
    argv, path, environment, constants = sys.argv, [*sys.path], dict(os.environ), _constants()
    threads, dtype, folder = torch.get_num_threads(), torch.get_default_dtype(), os.getcwd()
    sys.argv = [program, *arguments]
    sys.path.insert(0, os.path.dirname(program))
    torch.manual_seed(torch.initial_seed())
    random.seed()
    np.random.seed()
    try:
        with warnings.catch_warnings():
            yield
    finally:
        sys.argv, sys.path[:] = argv, path
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)
        for name, before in constants.items():
            vars(sys.modules[name]).update(before)
        gc.collect()


@contextmanager
def _printing_to(file: Path) -> Iterator[None]:
    kept = [os.dup(descriptor) for descriptor in (1, 2)]
    with file.open("wb") as out:
        for descriptor in (1, 2):
            os.dup2(out.fileno(), descriptor)
        try:
            yield
        finally:
            for descriptor, stream, before in zip((1, 2), (sys.stdout, sys.stderr), kept, strict=True):
                stream.flush()
                os.dup2(before, descriptor)
                os.close(before)


def _run(program: str, arguments: list[str]) -> int:
    """Run a program; return the exit code that its process would have."""
    try:
        with _as_in_a_process_of_its_own(program, arguments):
            runpy.run_path(program, run_name="__main__")
    except SystemExit as end:
        return 0 if end.code is None else end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def main(folder: Path) -> None:
    """Run what each line of this rank's pipe says, and write a file with the exit code; end with the pipe."""
    rank = MPI.COMM_WORLD.rank
    with (folder / f"tasks.{rank}").open() as tasks:
        for line in tasks:
            task = json.loads(line)
            with _printing_to(folder / f"printed.{rank}"):
                code = _run(task["program"], task["arguments"])
            done = folder / f"done.{task['number']}.{rank}"
            (unfinished := folder / f"unfinished.{rank}").write_text(str(code))
            unfinished.rename(done)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
