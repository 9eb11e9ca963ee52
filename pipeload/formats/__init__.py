"""Packed weights: which forms are streamed, how they are read, shown and computed with."""
