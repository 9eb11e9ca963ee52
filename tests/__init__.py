"""Tests: by room, by promise; what they share, and tools to be run by hand."""
