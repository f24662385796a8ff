"""The decoding engine: pure mathematics (law, width, verify), the tree, and the methods as generators."""
