"""The page of a run or of a comparison, report.html: its sections, charts and HTML."""
