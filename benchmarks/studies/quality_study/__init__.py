"""The parts of `commands.quality`: caches of some budgets, measured and drawn."""
