"""A save in the formats of others."""
