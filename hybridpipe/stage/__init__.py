"""Stage: one rank's layers in torch, their forward, backward and weights; knows no MPI."""
