"""What would hurt a long run, found before it."""
