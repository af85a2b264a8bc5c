"""The stack, the marks and the memo of the pickle machine, with their limits."""

from __future__ import annotations

from typing import Any

from holdfast.core.errors import Damaged
from holdfast.sources.pickles.byte_windows import PickleStream

_OBJECTS = 200_000  # the limit for small files; larger ones may build one per 4 bytes
_OBJECT_BYTES = 4


class Stack:
    """The values that a pickle has built so far."""

    def __init__(self, stream: PickleStream) -> None:
        self._stream = stream
        self._stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self._memo: list[Any] = []
        self._far_memo: dict[int, Any] = {}  # indices out of order
        self._objects = 0
        self._most_objects = max(_OBJECTS, (stream.end - stream.begin) // _OBJECT_BYTES)

    def _damaged(self, problem: str) -> Damaged:
        return Damaged(f"{self._stream.where}: not a valid pickle at byte {self._stream.position}: {problem}")

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _pop(self) -> Any:
        if not self._stack:
            raise self._damaged("a pop from an empty stack")
        return self._stack.pop()

    def _top(self) -> Any:
        if not self._stack:
            raise self._damaged("a read from an empty stack")
        return self._stack[-1]

    def _count(self, objects: int) -> None:
        """Count objects that take memory; the size of the file is the limit."""
        self._objects += objects
        if self._objects > self._most_objects:
            raise self._damaged(f"more than {self._most_objects} objects in a file of {self._stream.end} bytes")

    def _push_object(self, value: Any) -> None:
        self._count(1)
        self._stack.append(value)

    def _mark(self) -> None:
        self._count(1)
        self._marks.append(self._stack)
        self._stack = []

    def _since_mark(self) -> list[Any]:
        if not self._marks:
            raise self._damaged("missing mark")
        items, self._stack = self._stack, self._marks.pop()
        return items

    def _drop(self) -> None:
        if self._stack:
            self._stack.pop()
        else:
            self._since_mark()

    def _forget_since_mark(self) -> None:
        self._since_mark()

    def _next_memo(self) -> int:
        return len(self._memo) + len(self._far_memo)

    def _put(self, index: int) -> None:
        value = self._top()
        if index == len(self._memo):
            self._memo.append(value)
        elif 0 <= index < len(self._memo):
            self._memo[index] = value
        else:
            self._count(1)
            self._far_memo[index] = value

    def _get(self, index: int) -> None:
        if 0 <= index < len(self._memo):
            self._stack.append(self._memo[index])
        elif index in self._far_memo:
            self._stack.append(self._far_memo[index])
        else:
            raise self._damaged(f"the memo has no value {index}")
