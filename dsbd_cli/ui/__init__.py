"""What a terminal shows: panels, waiting lines, charts, summaries."""
