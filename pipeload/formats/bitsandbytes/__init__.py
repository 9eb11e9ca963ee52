"""Weights that bitsandbytes has quantised."""
