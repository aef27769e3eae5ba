"""What a run measures, and how its figures are shown."""
