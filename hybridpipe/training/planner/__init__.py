"""Planner: from the trainer's argument `plan` to the plan that runs.

`Planner.plan_for` is the entry; where a checkpoint was found, `Planner.prefer` comes before it.
"""
