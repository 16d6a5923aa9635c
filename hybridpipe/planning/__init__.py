"""Planning: from the profile of a model and the figures of a cluster to plans, programs and predictions.

Pure: the standard library and numpy only. Nothing here imports torch or mpi4py (a test guards it),
reads a file or prints; `hybridpipe.files` reads and writes these types.
"""
