"""One key/value buffer a model: slots, rows of the tree attention mask, and the trees of all requests."""
