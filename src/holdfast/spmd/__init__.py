"""The sharding rules that DTensor lacks or gets wrong: `holdfast.spmd.enable()`."""

from holdfast.spmd.enable import disable, enable
from holdfast.spmd.report import Line, report

__all__ = ["Line", "disable", "enable", "report"]
