"""Measurements of a run, and their tables."""
