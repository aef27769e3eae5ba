"""The parts of `commands.analyze`."""
