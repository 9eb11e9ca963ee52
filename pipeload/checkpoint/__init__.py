"""Files, their entries, and reading them. No torch."""
