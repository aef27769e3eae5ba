"""What `compare.py` is made of: the configuration, batches, floors, processes, rows. No torch."""
