"""Comm: MPI groups of ranks, messages between them, and the status of each rank."""
