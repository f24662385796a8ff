"""Many prompts with one load of the pair: from a file to a file with resume, or from stdin to stdout."""

# As many prompts at a time as this machine does well.
AUTO = "auto"
