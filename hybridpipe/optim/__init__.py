"""Updates of weights, and what sums gradients."""
