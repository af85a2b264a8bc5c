"""A few lines for a small model to learn by heart."""

TEXT = """Kelp has no roots. What keeps it where it is, in surf that moves boulders, is a holdfast:
a knot of fingers that grows into every crack of the rock and does not let go.
Storms take the blades and the stalk, and the holdfast stays. From it the kelp grows again.
A training run is like that. Machines fail, meshes change, people stop and start.
What was learned must stay where it is, whole, and a new run must grow from it.
"""
