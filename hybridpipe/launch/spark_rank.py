"""Rank of `hybridpipe.spark.run`: calls the user's function, and leaves its value for the Spark task.

    python -m hybridpipe.launch.spark_rank FOLDER

Not known here: Spark, and how ranks are started. Invariant: a value's file is complete or absent.
"""

import pickle
import sys
from pathlib import Path

from hybridpipe.comm.mpi import MPI
from hybridpipe.data import Parquet
from hybridpipe.health import failure
from hybridpipe.launch.spark import FUNCTION


def main(folder: Path) -> None:
    """Call the function in `folder`, with the rows if there are any, and write what it returns."""
    failure.install()
    sys.path[:], payload = pickle.loads((folder / FUNCTION).read_bytes())  # as in Spark's Python
    import cloudpickle

    function, rows = pickle.loads(payload)
    value = cloudpickle.dumps(function() if rows is None else function(Parquet(rows)))
    part = folder / f"{MPI.COMM_WORLD.rank}.part"
    part.write_bytes(value)
    part.rename(part.with_suffix(".value"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
