"""The parts of `tasks.analyze`."""
