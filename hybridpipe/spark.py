"""Names for users of Spark: `hybridpipe.spark.run` starts ranks inside a Spark application.

Not known here: anything else. Invariant: pyspark is imported in `run` only.
"""

from hybridpipe.launch.spark import run

__all__ = ["run"]
