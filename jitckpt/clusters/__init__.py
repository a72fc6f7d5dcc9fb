"""What the machinery of clusters says of a job: where it runs, and as which part of it."""
