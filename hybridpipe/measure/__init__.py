"""Measurements of models, links and processors."""
