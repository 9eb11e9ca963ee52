"""The engine's parts for accelerators."""
