"""The five methods as loops that yield events."""
