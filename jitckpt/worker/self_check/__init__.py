"""Whether what a save would hold is enough to bring a training back."""
