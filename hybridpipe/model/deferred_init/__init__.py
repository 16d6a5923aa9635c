"""Deferred init: a model that is made without its weights, of which each rank makes those of its stage.

`deferred` makes it, `tape` records and replays what its factory did, `initialise` does so for meta modules.
"""
