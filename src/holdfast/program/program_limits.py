"""Limits of a program's JSON, checked before anything of it is built."""

from __future__ import annotations

from holdfast.core.limits import MIB

PROGRAM_BYTES = 64 * MIB
NODES = 200_000  # of all blocks together
STATE_ENTRIES = 200_000
INPUTS = 10_000
SYMBOLS = 10_000
GUARDS = 10_000
MODULES = 200_000  # that the keys of the weights make
KEY_DEPTH = 64  # modules in modules, by the dots of a key
NAME_CHARS = 256
TEXT_CHARS = 4_096  # a text argument, an origin, a schema
BLOCK_DEPTH = 8
VALUE_DEPTH = 8  # lists in lists among the arguments of a node
TREE_DEPTH = 32  # of the structure of inputs and outputs
SIZE_DEPTH = 32
SIZE_NODES = 1_000  # terms of one size or guard
LIST_ITEMS = 100_000
SIZE_MAX = 2**63 - 1
