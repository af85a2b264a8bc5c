"""Modules that every layer may use: errors, events, limits, names, ranks, warnings, durations, masking."""
