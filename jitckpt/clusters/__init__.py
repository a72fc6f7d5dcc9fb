"""What the machinery of clusters says of a job, and is told of it: where it runs, and as which part of it."""
