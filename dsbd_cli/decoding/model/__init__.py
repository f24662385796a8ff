"""What methods need of a model and of an engine, and real models that give it."""
