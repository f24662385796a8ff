"""Many prompts with one load of the pair: from a file to a file with resume, or from stdin to stdout."""
