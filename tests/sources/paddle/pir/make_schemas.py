"""Write the schemas of the operators in the table again, with the running torch; names are added by hand."""

from __future__ import annotations

from pathlib import Path

import torch

from holdfast.sources.paddle.pir import pir_schemas

HEAD = "# aten operators that translated Paddle programs call, with their schemas in torch 2.13"


def main() -> None:
    table = Path(pir_schemas.__file__).with_name("pir_schemas.txt")
    names = sorted(line.split(" ")[0] for line in table.read_text().splitlines() if line and not line.startswith("#"))
    lines = [f"{name} {getattr(getattr(torch.ops.aten, packet), overload)._schema}"
             for name in names for packet, overload in [name.split(".")]]  # fmt: skip
    table.write_text("\n".join([HEAD, "# python -m tests.sources.paddle.pir.make_schemas", *lines]) + "\n")


if __name__ == "__main__":
    main()
