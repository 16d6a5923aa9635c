"""Running a plan: instructions become calls."""
