"""The doctor: well on a machine that is well, and one line with a remedy for each thing that is not."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hybridpipe import environment
from hybridpipe.comm.mpi import MPI
from hybridpipe.launch import doctor, mpirun
from tests.mpi.single_copy import WITHOUT_SINGLE_COPY

DOCTOR = [sys.executable, "-m", "hybridpipe.launch.doctor"]


def examine(code="", **env):
    """A doctor of its own, with `code` run before it."""
    code = f"import sys\nfrom hybridpipe.launch import doctor, mpirun\n{code}\nsys.exit(doctor.main())"
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=os.environ | env, capture_output=True, text=True)


@pytest.fixture
def shadow(tmp_path):
    """A package that hides the real one of this name."""

    def make(name, text):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(text)
        return {"PYTHONPATH": str(tmp_path)}

    return make


def failed(done, name, detail, advice):
    assert done.returncode == 1
    assert "Traceback" not in done.stdout + done.stderr
    assert re.search(rf"^FAIL {name} .*{detail}.*\n.*→ .*{advice}", done.stdout, re.MULTILINE), done.stdout


def test_alone():
    done = examine()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FAIL" not in done.stdout


def test_under_mpirun_it_sends_and_speaks_once():
    done = mpirun.run(3, DOCTOR, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ok   Python") == 1
    assert "3 ranks on" in done.stdout
    assert "horovod and mpi averaged over 3 ranks" in done.stdout
    assert torch.cuda.is_available() or "ranks 0, 1, 2 on CPUs" in done.stdout


def test_crowded_cores_and_copied_messages_are_no_failure():
    env = os.environ | {"OMPI_MCA_mpi_yield_when_idle": "0"} | WITHOUT_SINGLE_COPY
    num_ranks = environment.num_cores() + 1
    if num_ranks > 8:
        pytest.skip("too many cores to crowd them")
    done = mpirun.run(num_ranks, DOCTOR, env=env, stdout=subprocess.PIPE)
    assert done.returncode == 0
    assert "→ set OMPI_MCA_mpi_yield_when_idle=1" in done.stdout
    if "Open MPI" in MPI.Get_library_version():
        copied = "large messages within a host are copied twice, in fragments of 1048576 bytes, 16 at once"
        assert re.search(f"^ok   single copy +none: {copied}$", done.stdout, re.MULTILINE), done.stdout


def test_ranks_bound_each_to_its_own_core_do_not_crowd_them():
    """Every rank counted the cores that it was bound to itself, one, for all the ranks of its host."""
    if environment.num_cores() < 2:
        pytest.skip("needs two cores")
    env = os.environ | {"OMPI_MCA_mpi_yield_when_idle": "0"}
    bind = "os.sched_setaffinity(0, [sorted(environment.cores())[int(os.environ['OMPI_COMM_WORLD_RANK'])]])"
    imports = "import os, sys\nfrom hybridpipe import environment\nfrom hybridpipe.launch import doctor"
    code = f"{imports}\n{bind}\nsys.exit(doctor.main())"
    done = mpirun.run(2, [sys.executable, "-c", code], env=env, stdout=subprocess.PIPE)
    assert done.returncode == 0
    assert "2 ranks on 2 cores" in done.stdout
    assert "yield_when_idle" not in done.stdout


def test_a_horovod_that_does_not_load(shadow):
    done = examine(**shadow("horovod", "raise ImportError('libtorch of another version')"))
    failed(done, "sync horovod", "libtorch of another version", "hybridpipe setup, or pip uninstall horovod")


def test_without_horovod_nothing_is_amiss():
    done = examine("sys.modules['horovod'] = None")
    assert done.returncode == 0, done.stdout
    assert re.search(r"^–    sync horovod +not installed, and not needed", done.stdout, re.MULTILINE)
    assert "FAIL" not in done.stdout and "→" not in done.stdout


def test_horovod_missing_on_one_rank_only(tmp_path):
    hide = "import os\nif os.environ['OMPI_COMM_WORLD_RANK'] == '1': sys.modules['horovod'] = None"
    code = f"import sys\nfrom hybridpipe.launch import doctor\n{hide}\nsys.exit(doctor.main())"
    done = mpirun.run(2, [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert done.returncode == 0, done.stdout
    assert re.search(r"^–    sync horovod  not installed.*\(rank 1, .*\)", done.stdout, re.MULTILINE)
    assert re.search(r"^ok   all-reduce +mpi averaged over 2 ranks", done.stdout, re.MULTILINE), done.stdout


def test_mpi_missing(shadow):
    done = examine(**shadow("mpi4py", "raise RuntimeError('cannot load MPI library')"))
    failed(done, "MPI library", "cannot load MPI library", "hybridpipe setup")


def test_torch_out_of_range(shadow):
    done = examine(**shadow("torch", "__version__ = '2.16.0'"))
    failed(done, "torch", "2.16.0 is not torch>=2.6,<2.16", "pip install")


def test_gpus_beside_a_horovod_for_cpus():
    """A torch that sees a GPU, beside a Horovod that was built for CPUs: MPI or torch's NCCL sums."""
    sees = "import torch\ntorch.version.cuda = '13.0'\ntorch.cuda.device_count = lambda: 1"
    sees += "\ntorch.cuda.get_device_name = lambda i: 'H100'"
    done = examine(f"from mpi4py import MPI\n{sees}")
    assert done.returncode == 0, done.stdout
    assert re.search(
        r"^ok   GPUs +1 H100, .*; all-reduces by (host memory|torch's NCCL)", done.stdout, re.MULTILINE
    )


def test_mixed_mpis(tmp_path):
    fake = tmp_path / "mpirun"
    fake.write_text("#!/bin/sh\necho 'mpirun (Open MPI) 3.0.1'\n")
    fake.chmod(0o755)
    done = examine(f"mpirun.find_program = lambda name: {str(fake)!r}")
    failed(done, "one MPI", "mpirun is Open MPI 3.0.1 but the library is", "first on the PATH")


def test_no_mpirun():
    done = examine("mpirun.find_program = lambda name: None")
    failed(done, "mpirun", "there is none", "hybridpipe setup")


def test_srun_without_pmix():
    done = examine(SLURM_STEP_ID="0", SLURM_STEP_NUM_TASKS="4", SLURM_PROCID="0")
    failed(done, "launcher", "it started 4 ranks, and each sees a world of 1", "srun --mpi=pmix")


def test_the_range_of_torch_is_that_of_pyproject():
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    low, high = re.search(r'"torch>=([\d.]+),<([\d.]+)"', text).groups()
    assert (low, high) == tuple(".".join(map(str, v)) for v in (doctor.TORCH_FROM, doctor.TORCH_BELOW))


@pytest.mark.parametrize(
    "text, name",
    [
        ("Open MPI v5.0.11, package: Open MPI user@localhost Distribution, ident: 5.0.11", "Open MPI 5.0.11"),
        ("mpirun (Open MPI) 4.1.4\n\nReport bugs to http://www.open-mpi.org/", "Open MPI 4.1.4"),
        ("MPICH Version:      4.2.3\nMPICH Release date: ...", "MPICH 4.2.3"),
        ("HYDRA build details:\n    Version:           4.2.3", "HYDRA 4.2.3"),
        ("Intel(R) MPI Library 2021.6 for Linux* OS", "Intel 2021.6"),
    ],
)
def test_makes_and_versions(text, name):
    assert doctor._make_and_version(text) == name
