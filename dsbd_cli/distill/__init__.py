"""A draft for a target that has no small sibling: sample, train, evaluate."""
