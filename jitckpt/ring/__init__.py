"""What a rank alone knows, of the last few steps, in memory that outlives it."""
