"""The mapping language: parse, expand, compile to recipes. Imports no torch and reads only mapping files."""

from holdfast.mapping.compile.compile import Compiled
from holdfast.mapping.program import Mapping
from holdfast.mapping.syntax.statement import Sized, Spec, Statement

__all__ = ["Compiled", "Mapping", "Sized", "Spec", "Statement"]
