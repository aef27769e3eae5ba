"""What `tasks.quality` compares: caches of some budgets, measured and drawn."""
