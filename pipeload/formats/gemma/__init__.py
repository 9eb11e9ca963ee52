"""Gemma's own quantised checkpoints."""
