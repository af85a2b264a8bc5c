"""Models that are exported with the real Paddle: an MLP, CNNs, transformer blocks, in float32 and bfloat16; NaN."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import nn

INF, NAN = float("inf"), float("nan")
Shapes = Sequence[tuple[Sequence[int | None], str]]
Case = tuple[Callable[[], Any], Shapes]


class Mlp(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 4)
        )

    def forward(self, x: Any) -> Any:
        return F.softmax(self.net(x), -1)


class Cnn(nn.Layer):
    """Convolutions, two of them by groups, with BatchNorm and pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2D(3, 8, 3, padding=1), nn.BatchNorm2D(8)
        self.deep, self.deep_norm = nn.Conv2D(8, 8, 3, groups=8, padding=1, bias_attr=False), nn.BatchNorm2D(8)
        self.pool, self.mean, self.head = nn.MaxPool2D(2), nn.AdaptiveAvgPool2D(1), nn.Linear(8, 5)
        for norm in (self.norm, self.deep_norm):
            norm._mean.set_value(paddle.rand([8]))
            norm._variance.set_value(paddle.rand([8]) + 0.5)

    def forward(self, x: Any) -> Any:
        x = self.pool(F.relu(self.norm(self.first(x))))
        x = F.hardswish(self.deep_norm(self.deep(x))) + x
        return self.head(paddle.flatten(self.mean(x), 1))


class Block(nn.Layer):
    """A decoder block with an embedding, a causal mask made of sizes, and a head tied to the embedding."""

    def __init__(self, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.embedding = nn.Embedding(32, width)
        self.norm, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Any) -> Any:
        x = self.embedding(x)
        batch, length, width = paddle.shape(x)[0], paddle.shape(x)[1], x.shape[2]
        parts = self.qkv(self.norm(x)).reshape([batch, length, 3, self.heads, width // self.heads])
        q, k, v = parts.transpose([2, 0, 3, 1, 4]).unbind(0)
        scores = paddle.matmul(q, k, transpose_y=True) * (width // self.heads) ** -0.5
        mask = paddle.triu(paddle.full([length, length], -INF, scores.dtype), 1)
        mixed = paddle.matmul(F.softmax(scores + mask, -1), v)
        x = x + self.out(mixed.transpose([0, 2, 1, 3]).reshape([batch, length, width]))
        x = x + self.down(F.gelu(self.up(self.second(x)), approximate=True))
        return paddle.matmul(x, self.embedding.weight, transpose_y=True)


class Encoder(nn.Layer):
    """Paddle's own encoder layer, with a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, normalize_before=True)
        for parameter in self.parameters():
            parameter.set_value(parameter * 0.5)

    def forward(self, x: Any, mask: Any) -> Any:
        return self.layer(x, mask)


class Decoder(nn.Layer):
    """RMS norm, rotary positions, grouped heads, a gated MLP: as in the models of today."""

    def __init__(self, width: int = 16, heads: int = 4, groups: int = 2) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.q, self.k = nn.Linear(width, width, bias_attr=False), nn.Linear(width, 8, bias_attr=False)
        self.v, self.o = nn.Linear(width, 8, bias_attr=False), nn.Linear(width, width, bias_attr=False)
        self.gate, self.up = nn.Linear(width, 24, bias_attr=False), nn.Linear(width, 24, bias_attr=False)
        self.down = nn.Linear(24, width, bias_attr=False)
        self.weight = self.create_parameter([width], default_initializer=nn.initializer.Constant(0.5))
        angles = np.outer(np.arange(12), 1 / 10000 ** (np.arange(0, self.size, 2) / self.size))
        self.register_buffer("cos", paddle.to_tensor(np.cos(np.tile(angles, 2)), "float32"))
        self.register_buffer("sin", paddle.to_tensor(np.sin(np.tile(angles, 2)), "float32"))

    def rms(self, x: Any) -> Any:
        return x * paddle.rsqrt(paddle.mean(paddle.square(x), -1, keepdim=True) + 1e-6) * self.weight

    def rotate(self, x: Any) -> Any:
        length = paddle.shape(x)[1]
        cos, sin = self.cos[:length].unsqueeze([0, 2]), self.sin[:length].unsqueeze([0, 2])
        first, last = paddle.chunk(x, 2, -1)
        return x * cos + paddle.concat([-last, first], -1) * sin

    def forward(self, x: Any) -> Any:
        h = self.rms(x)
        q = self.rotate(self.q(h).reshape([0, 0, self.heads, self.size])).transpose([0, 2, 1, 3])
        k = self.rotate(self.k(h).reshape([0, 0, self.groups, self.size])).transpose([0, 2, 1, 3])
        v = self.v(h).reshape([0, 0, self.groups, self.size]).transpose([0, 2, 1, 3])
        k, v = (paddle.repeat_interleave(part, self.heads // self.groups, 1) for part in (k, v))
        mixed = paddle.matmul(F.softmax(paddle.matmul(q, k, transpose_y=True) * self.size**-0.5, -1), v)
        x = x + self.o(mixed.transpose([0, 2, 1, 3]).flatten(2))
        return x + self.down(F.silu(self.gate(self.rms(x))) * self.up(self.rms(x)))


class Mixed(nn.Layer):
    """bfloat16 weights and inputs. Paddle on a CPU multiplies float32, so that the products are cast."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)
        self.to(dtype="bfloat16")

    def forward(self, x: Any) -> Any:
        w, b = self.first.weight.astype("float32"), self.first.bias.astype("float32")
        x = F.gelu(F.linear(x.astype("float32"), w, b)).astype("bfloat16") * 0.3
        y = F.linear(x.astype("float32"), self.last.weight.astype("float32"), self.last.bias.astype("float32"))
        return y.astype("bfloat16"), y


class MixedCnn(Cnn):
    """bfloat16 weights of convolutions and statistics of float32."""

    def __init__(self) -> None:
        super().__init__()
        self.first.to(dtype="bfloat16")
        self.deep.to(dtype="bfloat16")

    def forward(self, x: Any) -> Any:
        weight, bias = self.first.weight.astype("float32"), self.first.bias.astype("float32")
        x = F.conv2d(x.astype("float32"), weight, bias, padding=1)
        x = self.pool(F.relu(self.norm(x))).astype("bfloat16").astype("float32")
        x = F.conv2d(x, self.deep.weight.astype("float32"), padding=1, groups=8)
        return self.head(paddle.flatten(self.mean(self.deep_norm(x)), 1)).astype("bfloat16")


class MixedBlock(Block):
    """The decoder block with bfloat16 weights that are cast where they are used."""

    def __init__(self) -> None:
        super().__init__()
        self.to(dtype="bfloat16")

    def project(self, layer: Any, x: Any) -> Any:
        return F.linear(x, layer.weight.astype("float32"), layer.bias.astype("float32"))

    def normalize(self, layer: Any, x: Any) -> Any:
        return F.layer_norm(x, [16], layer.weight.astype("float32"), layer.bias.astype("float32"))

    def forward(self, x: Any) -> Any:
        x = F.embedding(x, self.embedding.weight).astype("float32")
        parts = self.project(self.qkv, self.normalize(self.norm, x)).reshape([0, 0, 3, self.heads, 4])
        q, k, v = parts.transpose([2, 0, 3, 1, 4]).unbind(0)
        mixed = paddle.matmul(F.softmax(paddle.matmul(q, k, transpose_y=True) * 0.5, -1), v)
        x = x + self.project(self.out, mixed.transpose([0, 2, 1, 3]).reshape([0, 0, 16]))
        x = x + self.project(self.down, F.gelu(self.project(self.up, self.normalize(self.second, x))))
        return x.astype("bfloat16")


class Specials(nn.Layer):
    """NaN and infinite numbers as attributes, which Paddle saves and cannot load again."""

    def forward(self, x: Any) -> Any:
        low = paddle.clip(x, min=-INF, max=0.5)
        return (
            paddle.full([2, 3], NAN), paddle.full([3], INF), low, paddle.where(x > 0, x, paddle.full_like(x, NAN)),
            paddle.scale(x, scale=INF), F.leaky_relu(x, NAN), paddle.full([2, 2], -INF, "float64"),
        )  # fmt: skip


MODELS: dict[str, Case] = {
    "mlp": (Mlp, (([None, 8], "float32"),)),
    "cnn": (Cnn, (([None, 3, 8, 8], "float32"),)),
    "block": (Block, (([None, None], "int64"),)),
    "encoder": (Encoder, (([None, None, 16], "float32"), ([None, 1, None, None], "float32"))),
    "decoder": (Decoder, (([None, None, 16], "float32"),)),
    "mixed": (Mixed, (([None, 8], "bfloat16"),)),
    "mixed_cnn": (MixedCnn, (([None, 3, 8, 8], "bfloat16"),)),
    "mixed_block": (MixedBlock, (([None, None], "int64"),)),
    "specials": (Specials, (([None, 3], "float32"),)),
}
