"""The settings that are quickest on this machine, for this pair and a user's own prompts (docs/speed.md)."""
