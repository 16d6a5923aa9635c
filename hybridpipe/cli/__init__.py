"""Commands: argument parsing, and what each command calls."""
