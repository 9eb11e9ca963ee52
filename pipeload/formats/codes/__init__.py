"""Integers of other programs: how each lays them out, and which numbers they stand for."""
