"""Units on their way between disk and memory: one writer of their states, threads that read."""
