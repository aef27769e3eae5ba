"""The parts of the streaming tasks."""
