"""The agent's processes: its children, the workers among them, their spares and the guardian."""
