"""Data sets, minibatches and their loading; configurations name the data sets as `hybridpipe.data:digits`."""

from hybridpipe.data.datasets import digits, fashion_mnist
from hybridpipe.data.parquet import Parquet

__all__ = ["Parquet", "digits", "fashion_mnist"]
