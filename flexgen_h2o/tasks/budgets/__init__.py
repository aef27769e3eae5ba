"""The parts of `tasks.quality`: caches of some budgets, measured and drawn."""
