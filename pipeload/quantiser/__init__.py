"""`pipeload quantize`: makes checkpoints."""
