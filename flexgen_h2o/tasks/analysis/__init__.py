"""What `tasks.analyze` finds, shows and draws."""
