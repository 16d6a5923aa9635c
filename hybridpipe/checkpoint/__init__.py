"""Checkpoints on the disk: directories of hashed files, complete or absent (docs/reference/files.md)."""
