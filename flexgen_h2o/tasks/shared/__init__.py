"""What the jobs have in common."""
