"""The agent's side of transparent mode: the device proxies' servers, and recoveries in place."""
