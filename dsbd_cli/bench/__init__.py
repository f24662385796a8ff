"""Quality, tokens/s and joules per token of every method, measured on data sets and reported."""
