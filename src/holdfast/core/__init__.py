"""Modules that every layer may use: errors, limits, events, ranks."""
