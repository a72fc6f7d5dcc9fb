"""The worker's side: a training under protection, its saves and its end."""
