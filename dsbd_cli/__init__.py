"""Dynamic-width speculative beam decoding: the Python API (filled lazily, so `import dsbd_cli` is quick)."""
