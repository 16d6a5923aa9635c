"""Reports: text for people."""
