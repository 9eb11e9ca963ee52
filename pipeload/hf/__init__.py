"""Private parts of transformers, with the version that they were seen in."""
