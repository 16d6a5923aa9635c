"""Schedules: instructions for each rank, and what they imply."""
