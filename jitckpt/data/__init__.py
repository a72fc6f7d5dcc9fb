"""What a loop draws: batches and random numbers, so that a restart draws the same."""
