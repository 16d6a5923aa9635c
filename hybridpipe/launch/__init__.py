"""Starting ranks, and starting them again."""
