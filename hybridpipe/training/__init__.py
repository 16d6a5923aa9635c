"""The trainer: plan, epochs, evaluation, and where a training stands."""
