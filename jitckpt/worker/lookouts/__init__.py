"""What a training does that a failure would lose: it is seen, and said once in a sentence that helps."""
