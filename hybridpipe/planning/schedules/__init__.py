"""Schedules: instructions for each rank, and their consequences for memory, weights and resuming."""
