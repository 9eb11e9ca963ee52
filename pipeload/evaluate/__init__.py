"""`pipeload eval`: how well a model predicts a text."""
