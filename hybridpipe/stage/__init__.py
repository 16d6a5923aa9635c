"""Stage: one process's share of the model, in torch; no MPI here."""
