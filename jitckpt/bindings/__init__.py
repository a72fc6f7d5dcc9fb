"""The native libraries, called from Python."""
