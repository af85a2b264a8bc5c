"""A model's graph as frozen plain data: nodes, blocks, weights, inputs, and `ProgramData`, all of a program."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from holdfast.program.arguments import Ref, Value
from holdfast.program.sizes import Size
from holdfast.program.structures import Structure
from holdfast.version import __version__

if TYPE_CHECKING:
    import numpy.typing as npt

PARAMETER, BUFFER, CONSTANT = "parameter", "buffer", "constant"
STATE_KINDS = frozenset({PARAMETER, BUFFER, CONSTANT})
TRAINING, CORE = "training", "core"
DIALECTS = frozenset({TRAINING, CORE})
SET_GRAD, AUTOCAST, ITEM = "block.set_grad", "block.autocast", "tuple.item"
BLOCKS = frozenset({SET_GRAD, AUTOCAST})


@dataclass(frozen=True, slots=True)
class TensorType:
    """The dtype and shape of a tensor."""

    dtype: str
    shape: tuple[Size, ...]


@dataclass(frozen=True, slots=True)
class ScalarType:
    """A number that the program computes: "int", "float" or "bool", and its size if it is one."""

    kind: str
    size: Size | None = None


NodeType = None | TensorType | ScalarType | tuple["NodeType", ...]


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a node comes from: the path of its module, the function called, the source line.

    `composite` is the name and operator of the node that became this one when the program was decomposed.
    """

    module: str = ""
    call: str = ""
    line: str = ""
    composite: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Node:
    """One call: `op` is an aten overload such as "aten.linear.default", an operation on sizes, or a block."""

    name: str
    op: str
    args: tuple[Value, ...] = ()
    kwargs: Mapping[str, Value] = field(default_factory=dict)
    type: NodeType = None
    origin: Origin = field(default_factory=Origin)
    block: GraphBlock | None = None


@dataclass(frozen=True, slots=True)
class GraphBlock:
    """A graph inside a node: the names of its inputs, its nodes in order, and what it returns."""

    inputs: tuple[str, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class StateEntry:
    """A tensor of the model: `key` is its key in the checkpoint, `aliases` other keys of the same tensor.

    Constants have keys of the group `program`; parameters and persistent buffers those of the model. A parameter is
    `frozen` if it had requires_grad=False at the export.
    """

    name: str
    kind: str
    key: str
    type: TensorType
    aliases: tuple[str, ...] = ()
    frozen: bool = False


@dataclass(frozen=True, slots=True)
class InputEntry:
    """One leaf of the inputs: a tensor, a number that may differ between calls, or a value fixed at export."""

    name: str
    type: TensorType | ScalarType | None = None  # None: the value is fixed
    value: Value = None


@dataclass(frozen=True, slots=True)
class Mutation:
    """A weight or an input that gets the value of a node when the program has run (programs in core aten)."""

    target: str
    value: Ref


@dataclass(frozen=True, slots=True)
class SpecializedSize:
    """A dim of an input that was declared dynamic and that torch made a constant."""

    input: str
    dim: int
    size: int


@dataclass(frozen=True, slots=True)
class ProgramData:
    """A model as data: inputs, weights by key, nodes in order, outputs. It says what to compute and computes nothing.

    `operators` maps every aten overload to the schema it was written for. `symbols` are the sizes that may differ
    between calls, each with its least and largest value; `guards` are conditions on them. `modules` maps module
    paths to classes. `constants` holds the tensors of the kind "constant" by key, until they are in a checkpoint.
    """

    inputs: tuple[InputEntry, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Value, ...]
    state: tuple[StateEntry, ...] = ()
    input_structure: Structure = field(
        default_factory=Structure
    )  # a tuple of the positional inputs and a dict of the others
    output_structure: Structure = field(default_factory=Structure)
    operators: Mapping[str, str] = field(default_factory=dict)
    symbols: Mapping[str, tuple[int, int | None]] = field(default_factory=dict)
    guards: tuple[Size, ...] = ()
    mutations: tuple[Mutation, ...] = ()
    modules: Mapping[str, str] = field(default_factory=dict)
    specialized: tuple[SpecializedSize, ...] = ()
    dialect: str = TRAINING
    training: bool = False
    group: str = "model"  # of the weights in the checkpoint
    mapping: str = ""  # from `key`s to those in the files, where tensors are stored in other shapes
    writer: Mapping[str, str] = field(default_factory=lambda: {"holdfast": __version__})
    constants: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict, compare=False, repr=False)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the weights and then of the inputs."""
        return (*(entry.name for entry in self.state), *(entry.name for entry in self.inputs))

    @property
    def block(self) -> GraphBlock:
        """The whole graph as a block: its inputs are the weights and then the inputs."""
        return GraphBlock(self.names, self.nodes, self.outputs)

    def walk(self) -> Iterator[Node]:
        """Yield every node, those inside of blocks after the node that has them."""
        yield from walk_nodes(self.nodes)

    def keys(self) -> list[str]:
        """Return the keys of the weights in the checkpoint, without constants."""
        return [entry.key for entry in self.state if entry.kind != CONSTANT]


def walk_nodes(nodes: tuple[Node, ...]) -> Iterator[Node]:
    """Yield nodes, and those inside of their blocks."""
    for node in nodes:
        yield node
        if node.block is not None:
            yield from walk_nodes(node.block.nodes)
