"""Tests, and the helpers they share: `models`, `cgroups` and `make_llama`."""
