"""Explaining a run: every iteration written down, replayed in the terminal, and drawn as a page."""

# How every record and every page begins, and nothing else that a path may name.
RECORD = '{"type": "start", "format": '
PAGE = (
    '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
    '<meta name="generator" content="dsbd trace">\n'
)
