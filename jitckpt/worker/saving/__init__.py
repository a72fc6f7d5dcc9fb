"""Saves of a rank: what the device and the host held after a step, written when ordered or regularly."""
