"""What a job's events and its checkpoint directory tell afterwards."""
