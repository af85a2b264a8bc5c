"""Write what `paddle.jit.save` exports, and what Paddle had in memory: `inference_writer.py FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import paddle


class Net(paddle.nn.Layer):
    """A linear layer, a norm with buffers and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = paddle.nn.Linear(3, 4)
        self.norm = paddle.nn.BatchNorm1D(4)
        self.scale = self.create_parameter([5, 2])

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.norm(self.linear(x)) + self.scale.sum()


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    paddle.seed(0)
    net = Net()
    for tensor in net.state_dict().values():
        tensor.set_value(paddle.rand(tensor.shape))
    net.eval()
    np.savez(folder / "truth.npz", **{tensor.name: tensor.numpy() for tensor in net.state_dict().values()})
    spec = [paddle.static.InputSpec([None, 3], "float32")]
    paddle.jit.save(net, str(folder / "net" / "model"), input_spec=spec)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
