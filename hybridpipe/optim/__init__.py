"""Optim: sums gradients over replicas, checks them and updates weights."""
