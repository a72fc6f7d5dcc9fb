"""How a rank's program ends, and what it tells the agent of it."""
