"""The phases of saves, loads and restores, and the engine of a run: its start, plan, flight, options and signals."""
