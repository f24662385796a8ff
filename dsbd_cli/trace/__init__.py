"""Explaining a run: every iteration written down, replayed in the terminal, and drawn as a page."""
