"""The agent of a host: it starts the workers, hears of failures and carries decisions out."""
