"""What the streaming jobs answer, measure and draw."""
