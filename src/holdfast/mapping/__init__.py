"""The mapping language: parse, check, compile to box algebra. Pure: no torch, and no file but the program's own."""

from holdfast.mapping.compile.compile import Compiled
from holdfast.mapping.program import Mapping
from holdfast.mapping.syntax.statement import Sized, Spec, Statement

__all__ = ["Compiled", "Mapping", "Sized", "Spec", "Statement"]
