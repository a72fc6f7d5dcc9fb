"""What the control thread of an agent knows of a start's ranks, hears of its own and tells of them."""
