"""Ranks inside Spark: weights as under mpirun, on two hosts as well, and one line where something is lost.

Two executors are two hosts: the Python of each has its own host name, in a UTS namespace, which wants root.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch

from hybridpipe.errors import UserError
from hybridpipe.launch import mpirun
from hybridpipe.launch import spark as launched
from tests.guide.blocks import PAGES
from tests.launch import spark_training

ROOT = Path(__file__).parents[2]
MISSING = [name for name in ("pyspark", "pyarrow") if importlib.util.find_spec(name) is None]
MISSING += [] if shutil.which("java") else ["Java"]
in_spark = [
    pytest.mark.spark,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}"),
]
LOCAL, CLUSTER = "local[4]", "local-cluster[2,2,1024]"
# An executor's working folder ends with the executor's number.
PYTHON_OF_A_HOST = f"""#!/bin/sh
case $PWD in
*/app-*) exec unshare --uts /bin/sh -c 'hostname "h${{PWD##*/}}"; exec {sys.executable} "$@"' sh "$@" ;;
*) exec {sys.executable} "$@" ;;
esac
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A SPARK_HOME of links: Spark keeps the folders of executors in it. Java inherits the environment."""
    import pyspark

    folder = tmp_path_factory.mktemp("spark")
    for entry in Path(pyspark.__file__).parent.iterdir():
        (folder / entry.name).symlink_to(entry)
    python = folder / "python-of-a-host"
    python.write_text(PYTHON_OF_A_HOST)
    python.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARK_HOME", str(folder))
        patch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
        patch.setenv("PYSPARK_PYTHON", str(python))
        patch.setenv("PYSPARK_DRIVER_PYTHON", sys.executable)
        patch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
        patch.setenv("OMP_NUM_THREADS", "1")
        yield folder


@pytest.fixture
def spark(home):
    """Start a session with the master that it is called with; stopped at the end."""
    from pyspark.sql import SparkSession

    if hasattr(SparkSession, "getActiveSession") and (active := SparkSession.getActiveSession()):
        active.stop()
    sessions = []

    def start(master):
        if master == CLUSTER and (os.geteuid() != 0 or shutil.which("unshare") is None):
            pytest.skip("needs root and unshare, for two host names")
        builder = SparkSession.builder.master(master).config("spark.ui.enabled", "false")
        sessions.append(builder.config("spark.log.level", "OFF").getOrCreate())
        return sessions[0]

    yield start
    for session in sessions:
        session.stop()


def digits_frame(session):
    from hybridpipe.data import digits

    images, classes = (part[:480] for part in digits().tensors)
    rows = [(image.flatten().tolist(), int(digit)) for image, digit in zip(images, classes)]
    return session.createDataFrame(rows, "pixels array<float>, digit long")


def weights_of_mpirun(rows, folder):
    program = [sys.executable, spark_training.__file__, str(rows), str(folder / "weights.pt")]
    assert mpirun.run(4, program, timeout_seconds=200).returncode == 0
    return torch.load(folder / "weights.pt")


def equal(these, those):
    return these.keys() == those.keys() and all(torch.equal(these[name], those[name]) for name in these)


@contextmanager
def one_line(*parts):
    """Expect an error of one line with these parts, without Java's behind it."""
    with pytest.raises((RuntimeError, UserError)) as caught:
        yield
    said = str(caught.value)
    assert "\n" not in said and all(part in said for part in parts), said
    assert caught.value.__cause__ is None and (
        caught.value.__context__ is None or caught.value.__suppress_context__
    )


def assert_gone(folder, num_ranks=4):
    """Every process of the job that the ranks noted ends within seconds."""
    noted = {int(word) for file in folder.iterdir() for word in file.read_text().split()}
    assert len(list(folder.iterdir())) == num_ranks
    end = time.monotonic() + 20
    while left := [each for each in noted if Path(f"/proc/{each}/environ").exists() and is_alive(each)]:
        assert time.monotonic() < end, left
        time.sleep(0.1)


def is_alive(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class TestInSpark:
    pytestmark = in_spark

    def test_a_data_frame_trains_to_the_weights_of_mpirun(self, spark, tmp_path):
        frame = digits_frame(spark(LOCAL))
        weights, *others = launched.run(spark_training.train, 4, frame, data_folder=tmp_path / "rows")
        assert others == [None, None, None]
        assert equal(weights, weights_of_mpirun(tmp_path / "rows", tmp_path))

    def test_executors_on_two_hosts_train_to_the_same_weights(self, spark, tmp_path):
        frame, rows = digits_frame(spark(CLUSTER)), tmp_path / "rows"
        ends = launched.run(spark_training.train_on_hosts, 4, frame, data_folder=rows)
        hosts = [host for _, host in ends]
        assert hosts in (["h0", "h0", "h1", "h1"], ["h1", "h1", "h0", "h0"])
        assert equal(ends[0][0], weights_of_mpirun(rows, tmp_path))

    def test_row_groups_are_small_where_rows_are_large(self, spark, tmp_path):
        """Spark looks at a group's size after 100 rows, unless told otherwise."""
        from pyarrow.parquet import read_metadata
        from pyspark.sql.functions import array_repeat, rand

        frame = spark(LOCAL).range(200, numPartitions=1).select(array_repeat(rand(1), 10_000).alias("x"))
        frame = frame.selectExpr("transform(x, (y, i) -> y * sqrt(i)) as x")  # what does not compress
        assert launched._write(frame, tmp_path / "rows") == 200
        (file,) = (tmp_path / "rows").glob("*.parquet")
        groups = [read_metadata(file).row_group(i) for i in range(read_metadata(file).num_row_groups)]
        assert max(group.total_byte_size for group in groups) < 3 * 2**20

    def test_rows_that_cannot_be_made_are_told_in_one_line(self, spark, tmp_path):
        from pyspark.sql.functions import udf

        frame = spark(LOCAL).range(9).select(udf(lambda number: 1 // 0, "long")("id").alias("x"))
        with one_line("Spark: ZeroDivisionError: "):
            launched.run(print, 2, frame, data_folder=tmp_path / "rows")
        assert not (tmp_path / "rows").exists()

    def test_a_function_without_rows_returns_a_value_by_rank(self, spark):
        def place():
            from mpi4py import MPI

            return MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size, MPI.Query_thread() == MPI.THREAD_MULTIPLE

        spark(LOCAL)
        assert launched.run(place, 3) == [(rank, 3, True) for rank in range(3)]

    def test_a_config_trains_on_the_rows(self, spark, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        rows = tmp_path / "rows"
        Path("small.toml").write_text(
            f"""
            [model]
            factory = "torch.nn:Linear"
            args = {{ in_features = 64, out_features = 10 }}
            [data]
            factory = "hybridpipe.data:Parquet"
            args = {{ folder = "{rows}", inputs = "pixels", target = "digit" }}
            [optimizer]
            factory = "torch.optim:SGD"
            args = {{ lr = 0.1 }}
            [train]
            minibatch = 48
            epochs = 1
            [plan]
            source = "dp"
            """
        )
        frame = digits_frame(spark(LOCAL))
        assert launched.run("small.toml", 2, frame, data_folder=rows) == [None, None]
        assert (tmp_path / "runs/small/model.safetensors").exists()
        with one_line("missing.toml"):
            launched.run("missing.toml", 2)

    def test_a_rank_that_raises_is_named(self, spark):
        def fail():
            from mpi4py import MPI

            if MPI.COMM_WORLD.rank == 1:
                raise OSError("no such\nmachine")
            MPI.COMM_WORLD.recv()

        spark(LOCAL)
        with one_line("rank 1 on host ", "OSError: no such machine"):
            launched.run(fail, 2)

    @pytest.mark.parametrize(
        "victim, said",
        [
            ("rank", "a rank was lost: SIGKILL (rank 2 on host "),
            ("task", "Spark lost task 0 on executor driver, host "),
        ],
        ids=["rank", "task"],
    )
    def test_what_is_killed_ends_the_job_in_one_line(self, spark, tmp_path, victim, said):
        spark(LOCAL)
        with one_line(said):
            launched.run(partial(spark_training.kill_above, 2, victim, tmp_path), 4)
        assert_gone(tmp_path)

    @pytest.mark.parametrize("rank", [0, 3], ids=["with mpirun", "with a daemon"])
    def test_a_killed_executor_ends_the_job_in_one_line(self, spark, tmp_path, rank):
        spark(CLUSTER)
        with one_line("Spark lost task ", " on executor ", ", host "):
            launched.run(partial(spark_training.kill_above, rank, "executor", tmp_path), 4)
        assert_gone(tmp_path)

    def test_the_page_of_the_guide_runs(self, home, tmp_path):
        (program,) = [each.text for each in PAGES["docs/guide/spark.md"] if each.language == "python"]
        (tmp_path / "train.py").write_text(program)
        done = subprocess.run(
            [sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300
        )
        assert "{'0.weight': (32, 64)," in done.stdout, done.stderr

    def test_more_ranks_than_tasks_at_once_are_refused(self, spark):
        spark(LOCAL)
        with one_line("num_proc must be <= the 4 tasks that Spark runs at once, got 5"):
            launched.run(print, 5)


def test_rows_that_another_host_has_kept_are_missed(tmp_path):
    """A temporary folder is one for each host, and those of others were left out without a word."""
    pq, pa = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    rows = tmp_path / "rows"
    rows.mkdir()
    pq.write_table(pa.table({"x": [1.0, 2.0]}), rows / "part-0.parquet")
    launched._check_all_here(rows, 2)
    with pytest.raises(UserError) as raised:
        launched._check_all_here(rows, 5)
    assert str(raised.value) == (
        "data_folder must be on a disk that all hosts share: this one sees 2 of 5 rows"
    )
    assert not rows.exists()


def test_without_pyspark_the_remedy_is_named(tmp_path):
    (tmp_path / "pyspark.py").write_text("raise ModuleNotFoundError(name='pyspark')")
    code = "import hybridpipe\ntry: hybridpipe.spark.run(print, 2)\nexcept ValueError as e: print(e)"
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    remedy = "pip install 'hybridpipe[spark]'"
    assert done.stdout == f"hybridpipe.spark needs pyspark, which is missing: {remedy}\n", done.stderr


@pytest.mark.parametrize(
    "given, said",
    [
        ({"num_proc": 0}, "num_proc must be"),
        ({"num_proc": 2, "data_folder": "rows"}, "data_folder is for the rows of a data_frame"),
        ({"num_proc": 2, "data_frame": object()}, "a config with a data_frame needs data_folder"),
    ],
)
def test_mistakes_are_refused_before_spark_starts(given, said):
    with pytest.raises(ValueError, match=said):
        launched.run("digits.toml", **given)


def test_only_a_function_or_a_path_is_run():
    with pytest.raises(UserError, match="what must be a function or the path of a config, got 3"):
        launched.run(3, 2)
