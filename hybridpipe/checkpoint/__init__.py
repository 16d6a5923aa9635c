"""Checkpoints on disk: a directory that is whole or not there, of hashed files (docs/reference/files.md)."""
