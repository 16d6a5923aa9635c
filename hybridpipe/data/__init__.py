"""Data sets, minibatches and their loading; configurations name the data sets as `hybridpipe.data:digits`."""

from hybridpipe.data.datasets import digits, fashion_mnist

__all__ = ["digits", "fashion_mnist"]
