"""The sharding rules that DTensor lacks or gets wrong: `holdfast.spmd.enable()`."""

from holdfast.spmd.reporting import Line, report
from holdfast.spmd.switch import disable, enable

__all__ = ["Line", "disable", "enable", "report"]
