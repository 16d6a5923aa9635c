"""Collectives over a stage's replicas, behind one protocol: by Horovod, MPI or torch.distributed."""
