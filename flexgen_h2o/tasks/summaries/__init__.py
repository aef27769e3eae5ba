"""The parts of `tasks.summarize`."""
