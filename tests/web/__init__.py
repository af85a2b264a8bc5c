"""The page: its server, its answers, attacks on it, and the page itself in a browser."""
