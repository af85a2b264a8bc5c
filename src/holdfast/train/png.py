"""A bitmap canvas with lines, boxes and text, written as PNG with only numpy and zlib."""

from __future__ import annotations

import itertools
import struct
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Color = tuple[int, int, int]
_SCALE = 3  # supersampling factor, for smooth lines

# Each glyph is seven rows of five pixels; a row is one base-32 digit.
_COLUMNS = 5
_DRAWN = """
0|ehjlphe 1|4c4444e 2|eh1248v 3|v2421he 4|26aiv22 5|vgu11he 6|68guhhe 7|v124888 8|ehhehhe 9|ehhf12c
A|ehhvhhh B|uhhuhhu C|ehggghe D|sihhhis E|vgguggv F|vgguggg G|ehgnhhf H|hhhvhhh I|e44444e J|72222ic
K|hikokih L|ggggggv M|hrllhhh N|hhpljhh O|ehhhhhe P|uhhuggg Q|ehhhlid R|uhhukih S|fgge11u T|v444444
U|hhhhhhe V|hhhhha4 W|hhhllla X|hha4ahh Y|hhha444 Z|v1248gv .|00000cc ,|0000c48 :|0cc0cc0 -|000v000
+|044v440 /|01248g0 (|2488842 )|8422248 =|00v0v00 %|op248j3 _|000000v *|04lel40 #|aavavaa >|8421248
<|248g842 ;|0cc0c48
"""
_LETTERS = {letter: rows for letter, _, rows in (entry.partition("|") for entry in _DRAWN.split())}
LETTER_WIDTH = _COLUMNS + 1


class Canvas:
    """A white bitmap; coordinates are in pixels from the upper left."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self._pixels = np.full((height * _SCALE, width * _SCALE, 3), 255, np.uint8)

    def box(self, x: float, y: float, width: float, height: float, color: Color) -> None:
        """Draw a filled box, clipped to the canvas."""
        left, right = sorted((_whole(x), _whole(x + width)))
        top, bottom = sorted((_whole(y), _whole(y + height)))
        self._pixels[max(0, top) : max(0, bottom), max(0, left) : max(0, right)] = color

    def line(self, points: list[tuple[float, float]], color: Color, thickness: float = 1.5) -> None:
        """Draw a line through the points; a single point is a dot."""
        places = np.array(points, dtype=np.float64).reshape(-1, 2) * _SCALE
        if len(places) == 1:
            self._stamp(places, color, thickness)
        for begin, end in itertools.pairwise(places):
            count = int(np.abs(end - begin).max()) + 1
            self._stamp(begin + (end - begin) * np.linspace(0, 1, count + 1)[:, None], color, thickness)

    def _stamp(self, places: NDArray[np.float64], color: Color, thickness: float) -> None:
        radius = max(1, round(thickness * _SCALE / 2))
        reach = np.arange(-radius, radius + 1)
        disc = [(dx, dy) for dx in reach for dy in reach if dx * dx + dy * dy <= radius * radius]
        for dx, dy in disc:
            xs, ys = np.rint(places + np.array((dx, dy))).astype(int).T
            inside = (xs >= 0) & (ys >= 0) & (xs < self.width * _SCALE) & (ys < self.height * _SCALE)
            self._pixels[ys[inside], xs[inside]] = color

    def text(self, x: float, y: float, words: str, color: Color, size: int = 2) -> None:
        """Draw text with its upper left at (x, y); characters without a glyph are blank."""
        for position, letter in enumerate(words.upper()):
            for row, digit in enumerate(_LETTERS.get(letter, "")):
                for column in range(_COLUMNS):
                    if int(digit, 32) >> (_COLUMNS - 1 - column) & 1:
                        left = x + (position * LETTER_WIDTH + column) * size
                        self.box(left, y + row * size, size, size, color)

    def write(self, path: Path) -> None:
        """Write the canvas as a PNG file."""
        fine = self._pixels.reshape(self.height, _SCALE, self.width, _SCALE, 3)
        pixels = fine.mean(axis=(1, 3)).round().astype(np.uint8)
        rows = np.concatenate([np.zeros((self.height, 1), np.uint8), pixels.reshape(self.height, -1)], axis=1)
        head = struct.pack(">IIBBBBB", self.width, self.height, 8, 2, 0, 0, 0)
        body = zlib.compress(rows.tobytes(), 9)
        chunks = b"".join(_chunk(kind, data) for kind, data in ((b"IHDR", head), (b"IDAT", body), (b"IEND", b"")))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunks)


def _whole(place: float) -> int:
    return round(place * _SCALE)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
