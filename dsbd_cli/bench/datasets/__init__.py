"""Benchmark data: typed records, loaders of the official layouts, and the prompts built from them."""
