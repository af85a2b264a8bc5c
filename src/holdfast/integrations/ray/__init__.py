"""Ray Train: `RayCheckpointer` saves in the background, and reports each step to Ray once it is committed."""

from holdfast.integrations.ray.ray_checkpointer import RayCheckpointer
from holdfast.integrations.ray.reported_steps import address

__all__ = ["RayCheckpointer", "address"]
