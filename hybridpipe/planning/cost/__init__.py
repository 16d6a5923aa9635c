"""Cost: seconds and bytes of a plan, by formula."""
