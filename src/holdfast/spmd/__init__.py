"""The sharding rules that DTensor lacks or gets wrong: `holdfast.spmd.enable()`."""

from holdfast.spmd.switch import disable, enable
from holdfast.spmd.reporting import Line, report

__all__ = ["Line", "disable", "enable", "report"]
