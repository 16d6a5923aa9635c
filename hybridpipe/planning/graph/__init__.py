"""Graph: models as graphs of layers, and their order in a chain."""
