"""Model: the user's model as layers, their tensors and their random numbers."""
