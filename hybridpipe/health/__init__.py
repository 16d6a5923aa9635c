"""Failures, hangs and preemption of ranks, and faults injected by tests."""
