"""Engine: runs a plan on one rank, turning instructions into calls."""
