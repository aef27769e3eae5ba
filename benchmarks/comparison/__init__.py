"""The parts of `compare.py`: the configuration, batches, rooflines, processes, rows. No torch."""
