"""One job under faults, trials of many, and the hosts that they run on."""
