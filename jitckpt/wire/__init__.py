"""Plain data that crosses a border of processes."""
