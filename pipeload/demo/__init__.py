"""A small real model, made from what a Python package brings."""
