"""Costs of a plan: seconds and bytes, by formula."""
