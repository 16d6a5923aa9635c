"""The user's model, seen as layers."""
