"""Planning: from what a model costs and what the machines give to who does what, when.

Pure: the standard library and numpy only. Nothing here imports torch or mpi4py (a test guards it),
reads a file or prints; `hybridpipe.files` reads and writes these types.
"""
