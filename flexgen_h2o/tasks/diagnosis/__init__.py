"""What `doctor` finds out about a machine, and how it says it."""
