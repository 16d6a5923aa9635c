"""Data sets, minibatches, and their loading."""
