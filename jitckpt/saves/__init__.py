"""Saves on the disk: written whole or not at all, found, checked and chosen."""
