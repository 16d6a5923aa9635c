"""MPI: groups of ranks, messages, and what a rank waits for."""
