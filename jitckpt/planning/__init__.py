"""Decide before you pay: what each way of protecting a training job costs, and what it survives.

Everything here is a pure function of plain data; nothing touches a device, a network or a clock.
The formulas and where they come from: docs/how-it-works/planning.md.
"""
