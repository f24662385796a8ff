"""Iterations without the host: one layout, one law interface, captured iterations, the pipeline, the chooser."""
