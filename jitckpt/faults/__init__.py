"""Rehearsed failures: what `--fault` says, and what makes it happen."""
