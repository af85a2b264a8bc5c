"""Tools for rules: signatures, collectives over mesh axes, Partials, empty shards, checks, gathering."""
