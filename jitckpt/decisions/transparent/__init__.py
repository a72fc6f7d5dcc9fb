"""Transparent mode's decisions: pure functions of plain data, which know no process and no device.

docs/how-it-works/transparent.md has the model in plain words, and why each recovery is exact.
"""
