"""Trials of jobs on several hosts, and in memory: what befalls them, and whether they end right."""
