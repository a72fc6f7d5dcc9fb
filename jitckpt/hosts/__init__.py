"""Several hosts: connections between agents, rendezvous and stores."""
