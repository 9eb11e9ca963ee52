"""Several machines that run one model: each reads its own blocks, and all know every result."""
