"""Read the JSON of a Paddle program: its version, its limits, every field, and the order of its values."""

from __future__ import annotations

from typing import Any

from holdfast.core import limits
from holdfast.core.errors import Damaged, HoldfastError, Unsupported
from holdfast.core.names import key_problem
from holdfast.format import strictjson
from holdfast.sources.paddle.pir.pir_attributes import decode_attribute, decode_type
from holdfast.sources.paddle.pir.pir_program import (
    NO_VALUE,
    Attribute,
    PirOperator,
    PirParameter,
    PirProgram,
    PirResult,
    PirType,
)

# Versions of PIR that Holdfast was checked with: Paddle 3.2 writes 3, Paddle 3.3 writes 4. Between the releases Paddle
# changes types and defaults of attributes (its patches), which readers of another version have to know.
VERSIONS = (1, 2, 3, 4)
PROGRAM_BYTES = 64 * limits.MIB
OPERATORS = 200_000
OPERANDS = 100_000
NAME_CHARS = 256
_DIALECTS = {"0": "builtin", "1": "pd_op", "2": "cf", "3": "custom_op", "4": "dist"}
_MARK = b'"pir"'


def is_pir(data: bytes) -> bool:
    """Return True if bytes look like the beginning or the whole of a Paddle program, without parsing them."""
    return data.lstrip()[:1] == b"{" and _MARK in data and b'"base_code"' in data


def read_pir(data: bytes, where: str) -> PirProgram | None:
    """Return the program of a JSON file; None for other JSON.

    Raises Unsupported for a version of PIR that Holdfast does not know, and Damaged for what no Paddle writes.
    """
    fields = strictjson.loads(data, where, limit_bytes=PROGRAM_BYTES)
    base = fields.get("base_code") if isinstance(fields, dict) else None
    if not isinstance(base, dict) or base.get("magic") != "pir":
        return None
    version = base.get("version")
    if type(version) is not int or version not in VERSIONS:
        raise Unsupported(
            f"{where}: a Paddle program of PIR version {str(version)[:40]}, but Holdfast knows {VERSIONS[0]} to "
            f"{VERSIONS[-1]}: install a newer Holdfast, or export with a release of Paddle 3.0 to 3.3"
        )
    try:
        return _ProgramReader(where).program(fields.get("program"), version, base.get("trainable") is True)
    except (HoldfastError, MemoryError):
        raise
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise Damaged(f"{where}: a field is missing or invalid: {type(error).__name__}: {str(error)[:200]}") from None


class _ProgramReader:
    """Decodes one program; every problem names the file and the operator."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._place = "the program"
        self._count = 0

    def _problem(self, text: str) -> HoldfastError:
        return Damaged(f"{self._where}: {self._place}: {text}")

    def _list(self, data: Any, limit: int) -> list[Any]:
        if not isinstance(data, list) or len(data) > limit:
            raise self._problem(f"not a list of at most {limit}")
        return data

    def program(self, data: Any, version: int, trainable: bool) -> PirProgram:
        regions = self._list(data["regions"], OPERATORS)
        if len(regions) != 1 or len(self._list(regions[0]["blocks"], OPERATORS)) != 1:
            raise self._problem("not one region with one block")
        block = regions[0]["blocks"][0]
        scope = {NO_VALUE}
        self._arguments(block, scope)
        parameters: list[PirParameter] = []
        operators: list[PirOperator] = []
        for fields in self._operators(block):
            if fields.get("#") == "p":
                parameters.append(self._parameter(fields, scope))
            else:
                operators.append(self._operator(fields, scope))
        self._check_keys(parameters)
        return PirProgram(version, trainable, tuple(parameters), tuple(operators))

    def _operators(self, block: Any) -> list[Any]:
        found = self._list(block["ops"], OPERATORS)
        self._count += len(found)
        if self._count > OPERATORS:
            raise self._problem(f"more than {OPERATORS} operators")
        return found

    def _check_keys(self, parameters: list[PirParameter]) -> None:
        keys: set[str] = set()
        for parameter in parameters:
            self._place = f"the parameter {parameter.key[:80]!r}"
            if parameter.key in keys:
                raise self._problem("two parameters have this name")
            keys.add(parameter.key)

    def _define(self, number: Any, scope: set[int]) -> int:
        if type(number) is not int or abs(number) >= 2**63:
            raise self._problem("a value without a number")
        if number in scope and number != NO_VALUE:
            raise self._problem(f"the value %{number} is defined twice")
        scope.add(number)
        return number

    def _parameter(self, fields: Any, scope: set[int]) -> PirParameter:
        attributes = fields["A"]
        if not isinstance(attributes, list) or len(attributes) < 4 or not isinstance(attributes[3], str):
            raise self._problem(f"a parameter has no name: {str(fields)[:100]}")
        key = attributes[3]
        self._place = f"the parameter {key[:80]!r}"
        if problem := key_problem(key):
            raise self._problem(f"its name {problem}")
        flags = fields.get("OA", [])
        trainable = isinstance(flags, list) and len(flags) > 2 and flags[2] == 1
        result = fields["O"]
        number = self._define(result["%"], scope)
        return PirParameter(key, number, decode_type(result["TT"], self._problem), trainable)

    def _operator(self, fields: Any, scope: set[int]) -> PirOperator:
        name = self._name(fields["#"])
        self._place = f"the operator {name}"
        inputs = tuple(self._used(item["%"], scope) for item in self._list(fields["I"], OPERANDS))
        attributes: dict[str, Attribute] = {}
        for item in self._list(fields["A"], OPERANDS):
            key = item["N"]
            if not isinstance(key, str) or len(key) > NAME_CHARS or key in attributes:
                raise self._problem(f"an attribute without a name of its own: {str(key)[:80]!r}")
            attributes[key] = decode_attribute(item["AT"], self._problem)
        regions = self._list(fields.get("regions", []), OPERANDS)
        inner = tuple(operator for region in regions for operator in self._region(region, scope))
        self._place = f"the operator {name}"
        results = tuple(self._result(item, scope) for item in self._list(fields["O"], OPERANDS))
        return PirOperator(name, inputs, results, attributes, inner, len(regions))

    def _name(self, text: Any) -> str:
        if not isinstance(text, str) or not 0 < len(text) <= NAME_CHARS or not text.isascii() or not text.isprintable():
            raise self._problem(f"an operator without a name: {str(text)[:80]!r}")
        dialect, dot, name = text.partition(".")
        return f"{_DIALECTS.get(dialect, dialect)}.{name}" if dot else text

    def _used(self, number: Any, scope: set[int]) -> int:
        if type(number) is not int or number not in scope:
            raise self._problem(f"the value %{str(number)[:40]} is not defined before its use")
        return number

    def _result(self, fields: Any, scope: set[int]) -> PirResult:
        kind: PirType = decode_type(fields["TT"], self._problem)
        return PirResult(self._define(fields["%"], scope), kind)

    def _region(self, region: Any, scope: set[int]) -> list[PirOperator]:
        found = []
        for block in self._list(region["blocks"], OPERANDS):
            self._arguments(block, scope)
            found += [self._operator(fields, scope) for fields in self._operators(block)]
        return found

    def _arguments(self, block: Any, scope: set[int]) -> None:
        for name in ("args", "kwargs"):
            for item in self._list(block.get(name, []), OPERANDS):
                number = item["%"] if "%" in item else item["#"]
                if number not in scope:  # kwargs repeat the arguments
                    self._define(number, scope)
