"""Whole shards of past steps in memory that outlives a rank: this host's, and other hosts'."""
