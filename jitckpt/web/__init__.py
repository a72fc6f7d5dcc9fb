"""A job for those who look at it from outside: Prometheus and a page. It reads events and writes nothing."""
