"""The simulation of a plan."""
