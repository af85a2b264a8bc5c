"""`Program`, the public class: made by `export_program` or node by node, written to and read from program.json."""

from __future__ import annotations

from dataclasses import dataclass, fields

from holdfast.program.decode import decode_program
from holdfast.program.encode import encode_program
from holdfast.program.graph import ProgramData


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Program(ProgramData):
    """A model as data that can be read, compared and run without the class that made it.

    `holdfast.export_program` makes one from a model, `holdfast.open(path).program` reads that of a checkpoint, and
    `holdfast.load_program` runs it.
    """

    def to_json(self) -> bytes:
        """Return the program as the bytes of program.json. The values of `constants` are not among them."""
        return encode_program(self)

    @staticmethod
    def from_json(data: bytes, where: str = "program.json") -> Program:
        """Read a program; raises Damaged or Unsupported before anything of it is built."""
        found = decode_program(data, where)
        return Program(**{field.name: getattr(found, field.name) for field in fields(found)})

    def check(self, where: str = "the program") -> Program:
        """Return the program itself if a reader accepts it; raises Damaged or Unsupported otherwise."""
        decode_program(self.to_json(), where)
        return self

    def __eq__(self, other: object) -> bool:
        """Programs are equal if program.json is, so that a NaN among their arguments equals itself."""
        return self.to_json() == other.to_json() if isinstance(other, Program) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.to_json())

    def __repr__(self) -> str:
        nodes = sum(1 for _ in self.walk())
        return f"<Program of {nodes} nodes, {len(self.state)} weights, {len(self.inputs)} inputs; {self.dialect}>"
