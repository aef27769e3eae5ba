"""What `tasks.summarize` makes, scores and draws."""
