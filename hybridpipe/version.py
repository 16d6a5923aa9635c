"""Version of hybridpipe; pyproject.toml and `hybridpipe --version` read it here."""

__version__ = "0.1.0"
