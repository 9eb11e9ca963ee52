"""How many bytes: planned before a model runs, governed while it does."""
