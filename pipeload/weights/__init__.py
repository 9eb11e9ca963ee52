"""From bytes to tensors: how weights lie, in which memory, and how they are read to their place."""
