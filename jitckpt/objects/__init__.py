"""Copies of the saves in an object store, where they outlive all hosts of a job."""
