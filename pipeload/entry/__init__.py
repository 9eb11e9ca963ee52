"""Ways in: `from_pretrained`, `wrap`, `plan`, `streaming`, scripts and notebooks."""
