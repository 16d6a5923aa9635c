"""What watches ranks, and what they do when something fails."""
