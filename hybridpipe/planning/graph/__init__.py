"""Models as graphs, made into chains."""
