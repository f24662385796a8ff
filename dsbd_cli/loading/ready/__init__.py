"""A pair that was loaded before, now without transformers: what the first load found out is read back."""
