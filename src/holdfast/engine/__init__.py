"""The story of a save and of a load, phase by phase: agree, plan, capture, write, publish; find, read, hand over."""
