"""Measuring scripts; each runs as `python benchmarks/NAME.py --help`. docs/speed.md says how they measure."""
