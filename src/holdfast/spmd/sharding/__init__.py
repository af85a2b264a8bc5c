"""Tools for rules: signatures, collectives, exchange of rows, Partials, empty shards, checks, gathering."""
