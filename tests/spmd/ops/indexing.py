"""Views, indexing, writes through views, joining and moving."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from tests.spmd.table import Table

TABLE = Table("indexing")
Write = Callable[..., Any]


def _written(write: Write) -> Callable[..., torch.Tensor]:
    """A function that writes into a copy of its first tensor and returns the copy."""

    def run(x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        copy = x.clone()
        write(copy, *others)
        return copy

    return run


def _set(key: Any, value: Any = None) -> Callable[..., torch.Tensor]:
    def write(copy: torch.Tensor, *others: torch.Tensor) -> None:
        copy[key] = others[0] if value is None else value

    return _written(write)


TABLE.add("slice_0", lambda x: x[1:3], "nm", free="m")
TABLE.add("slice_1", lambda x: x[:, :2], "nm", free="n")
TABLE.add("slice_step", lambda x: x[::2], "nm", free="m")
TABLE.add("slice_negative", lambda x: x[-2:], "nm", free="m")
TABLE.add("slice_empty", lambda x: x[2:2], "nm", free="m")
TABLE.add("select_0", lambda x: x[1], "nm", free="m")
TABLE.add("select_1", lambda x: x[:, 0], "nm", free="n")
TABLE.add("select_negative", lambda x: x[-1], "nm", free="m")
TABLE.add("select_both", lambda x: x[1, 1], "nm")
TABLE.add("select_range", lambda x: x[100], "nm")
TABLE.add("narrow", lambda x: x.narrow(0, 1, 2), "nm", free="m")
TABLE.add("index_none", lambda x: x[None, :, None], "nm", free="nm")
TABLE.add("unbind_0", lambda x: torch.unbind(x, 0), "nm", free="m")
TABLE.add("unbind_1", lambda x: torch.unbind(x, 1), "nm", free="n")
TABLE.add("split_0", lambda x: torch.split(x, 2, 0), "nm", free="m")
TABLE.add("chunk_1", lambda x: torch.chunk(x, 2, 1), "nm", free="n")
TABLE.add("set_slice_scalar", _set(slice(1, 3), 2.0), "nm", free="nm")
TABLE.add("set_slice", _set(slice(0, 2)), "nm", "2m", free="m")
TABLE.add("set_step_scalar", _set(slice(None, None, 2), 2.0), "nm", free="nm")
TABLE.add("set_row_scalar", _set(1, 2.0), "nm", free="nm")
TABLE.add("set_row", _set(1), "nm", "m", free="m")
TABLE.add("set_column", _set((slice(None), 0)), "nm", "n", free="n")
TABLE.add("set_element", _set((1, 1), 2.0), "nm", free="nm")
TABLE.add("set_all", _set(slice(None), 2.0), "nm", free="nm")
TABLE.add("set_range", _set(100, 2.0), "nm")
TABLE.add("row_mul_", _written(lambda y: y[1].mul_(3.0)), "nm", free="m", grad=False)
TABLE.add("slice_zero_", _written(lambda y: y[:2].zero_()), "nm", free="m", grad=False)
TABLE.add("step_add_", _written(lambda y: y[::2].add_(1.0)), "nm", free="m", grad=False)
TABLE.add("narrow_copy_", _written(lambda y, v: y.narrow(0, 0, 2).copy_(v)), "nm", "2m", free="m", grad=False)
TABLE.add("select_fill_", _written(lambda y: y.select(1, 0).fill_(3.0)), "nm", free="n", grad=False)
TABLE.add("row_mul_grad", _written(lambda y: y[1].mul_(3.0)), "nm")
TABLE.add("slice_zero_grad", _written(lambda y: y[:2].zero_()), "nm")
TABLE.add("transpose_slice_", _written(lambda y: y.t()[:, 1].add_(1.0)), "nm", free="m", grad=False)
TABLE.add("view_mul_", _written(lambda y: y.view(-1).mul_(2.0)), "nm", grad=False)

TABLE.add("index_plain", lambda x, i: x[i], "nm", "plainint:k<n")
TABLE.add("index", lambda x, i: x[i], "nm", "int:k<n")
TABLE.add("index_list", lambda x: x[[0, 2, 1]], "nm", free="m")
TABLE.add("index_column", lambda x, i: x[:, i], "nm", "int:k<m", free="n")
TABLE.add("index_pair", lambda x, i, j: x[i, j], "nm", "int:k<n", "int:k<m")
TABLE.add("index_negative", lambda x, i: x[i - 2], "nm", "int:k<2")
TABLE.add("index_zero_dim", lambda x, i: x[i], "nm", "int:<n")
TABLE.add("index_range", lambda x, i: x[i + 100], "nm", "int:k<2")
TABLE.add("mask", lambda x, mask: x[mask], "nm", "bool:nm")
TABLE.add("mask_rows", lambda x, mask: x[mask], "nm", "bool:n")
TABLE.add("mask_plain", lambda x, mask: x[mask], "nm", "plainbool:nm")
TABLE.add("mask_of_itself", lambda x: x[x > 0], "nm")
TABLE.add("masked_select", torch.masked_select, "nm", "bool:nm")
TABLE.add("masked_scatter", lambda x, mask, v: x.masked_scatter(mask, v), "nm", "bool:nm", "nm")
TABLE.add("set_index", _written(lambda y, i, v: y.__setitem__(i, v.sum(0))), "nm", "int:k<n", "km")
TABLE.add("set_index_scalar", _written(lambda y, i: y.__setitem__(i, 2.0)), "nm", "int:k<n")
TABLE.add("set_index_plain", _written(lambda y, i: y.__setitem__(i, 2.0)), "nm", "plainint:k<n")
TABLE.add("set_mask_scalar", _written(lambda y, mask: y.__setitem__(mask, 2.0)), "nm", "bool:nm", free="nm")
TABLE.add("set_mask_plain", _written(lambda y, mask: y.__setitem__(mask, 2.0)), "nm", "plainbool:nm", free="nm")
TABLE.add("set_mask_rows", _written(lambda y, mask: y.__setitem__(mask, 2.0)), "nm", "bool:n")
TABLE.add("index_put", lambda x, i, v: x.index_put((i,), v.sum(0)), "nm", "int:k<n", "km")
TABLE.add("index_put_accumulate", lambda x, i, v: x.index_put((i,), v, accumulate=True), "nm", "int:k<n", "km")
TABLE.add("index_put_", _written(lambda y, i, v: y.index_put_((i,), v, accumulate=True)), "nm", "int:k<n", "km")
TABLE.add("index_select_0", lambda x, i: torch.index_select(x, 0, i), "nm", "int:k<n", free="m")
TABLE.add("index_select_1", lambda x, i: torch.index_select(x, 1, i), "nm", "int:k<m", free="n")
TABLE.add("index_add", lambda x, i, v: torch.index_add(x, 0, i, v), "nm", "int:k<n", "km", free="m")
TABLE.add("index_copy", lambda x, v: torch.index_copy(x, 0, torch.tensor([1, 0]).to(x.device), v), "nm", "2m")
TABLE.add("index_copy_from_cpu", lambda x, v: torch.index_copy(x, 0, torch.tensor([1, 0]), v), "nm", "2m")
TABLE.add("index_from_cpu", lambda x: x[torch.tensor([1, 0])], "nm", free="m")
TABLE.add("index_fill", lambda x, i: torch.index_fill(x, 0, i, 2.0), "nm", "int:k<n", free="m")
TABLE.add("gather_0", lambda x, i: torch.gather(x, 0, i), "nm", "int:km<n", free="m")
TABLE.add("gather_1", lambda x, i: torch.gather(x, 1, i), "nm", "int:nk<m", free="n")
TABLE.add("take_along_dim", lambda x, i: torch.take_along_dim(x, i, 1), "nm", "int:nk<m", free="n")
TABLE.add("take", torch.take, "nm", "int:k<m")
TABLE.add("scatter_0", lambda x, i: torch.scatter(x, 0, i, 2.0), "nm", "int:km<n", free="m")
TABLE.add("scatter_add_0", lambda x, i, v: torch.scatter_add(x, 0, i, v), "nm", "int:nm<n", "nm", free="m")
TABLE.add("scatter_add_1", lambda x, i, v: torch.scatter_add(x, 1, i, v), "nm", "int:nm<m", "nm", free="n")
for _how in "sum prod amax amin mean".split():
    TABLE.add(
        f"scatter_reduce_{_how}",
        lambda x, i, v, _h=_how: torch.scatter_reduce(x, 0, i, v, _h),
        *("nm", "int:nm<n", "nm"),
        free="m",
    )
TABLE.add("select_scatter", lambda x, v: torch.select_scatter(x, v, 0, 1), "nm", "m", free="m")
TABLE.add("slice_scatter", lambda x, v: torch.slice_scatter(x, v, 0, 0, 2), "nm", "2m", free="m")
TABLE.add("diagonal_scatter", torch.diagonal_scatter, "nn", "n")
TABLE.add("nonzero", torch.nonzero, "ties:nm", grad=False)
TABLE.add("nonzero_tuple", lambda x: torch.nonzero(x, as_tuple=True), "ties:nm", grad=False)
TABLE.add("argwhere", torch.argwhere, "ties:nm", grad=False)
TABLE.add("where_index", torch.where, "bool:nm", grad=False)
TABLE.add("one_hot", F.one_hot, "int:n<m", grad=False)
TABLE.add("one_hot_classes", lambda i: F.one_hot(i, 10), "int:nm<m", free="nm", grad=False)
TABLE.add("view", lambda x: x.view(-1), "nm")
TABLE.add("reshape", lambda x: x.reshape(2, -1), "c6", free="")
TABLE.add("flatten", lambda x: torch.flatten(x, 1), "nmk", free="n")
TABLE.add("flatten_all", torch.flatten, "nmk")
TABLE.add("unflatten", lambda x: x.unflatten(1, (2, -1)), "nc", free="n")
TABLE.add("t", torch.t, "nm", free="nm")
TABLE.add("t_", _written(lambda y: None) and (lambda x: x.clone().t_()), "nm", free="nm", grad=False)
TABLE.add("transpose", lambda x: x.transpose(0, 2), "nmk", free="nmk")
TABLE.add("permute", lambda x: x.permute(2, 0, 1), "nmk", free="nmk")
TABLE.add("squeeze", lambda x: x.squeeze(1), "n1m", free="nm")
TABLE.add("unsqueeze", lambda x: x.unsqueeze(1), "nm", free="nm")
TABLE.add("expand", lambda x: x.expand(3, -1, -1), "nm", free="nm")
TABLE.add("repeat", lambda x: x.repeat(2, 1), "nm", free="m")
TABLE.add("tile", lambda x: x.tile(1, 2), "nm", free="n")
TABLE.add("repeat_interleave", lambda x: torch.repeat_interleave(x, 2, 0), "nm", free="m")
TABLE.add("repeat_interleave_tensor", lambda x, i: torch.repeat_interleave(x, i, 0), "nm", "int:n<m", free="m")
TABLE.add("movedim", lambda x: x.movedim(0, -1), "nmk", free="nmk")
TABLE.add("contiguous", lambda x: x.t().contiguous(), "nm", free="nm")
TABLE.add("unfold", lambda x: x.unfold(0, 2, 1), "nm", free="m")
TABLE.add("cat_0", lambda x, y: torch.cat([x, y], 0), "nm", "nm", free="m")
TABLE.add("cat_1", lambda x, y: torch.cat([x, y], 1), "nm", "nm", free="n")
TABLE.add("stack", lambda x, y: torch.stack([x, y], 1), "nm", "nm", free="nm")
TABLE.add("roll", lambda x: torch.roll(x, 1, 0), "nm", free="m")
TABLE.add("flip", lambda x: torch.flip(x, (0,)), "nm", free="m")
TABLE.add("rot90", torch.rot90, "nm")
TABLE.add("tril", torch.tril, "tnm", free="tnm")
TABLE.add("triu", lambda x: torch.triu(x, 1), "tnm", free="tnm")
TABLE.add("tril_", _written(lambda y: y.tril_(-1)), "nm", free="nm")
TABLE.add("diag", torch.diag, "n")
TABLE.add("diagonal", lambda x: torch.diagonal(x, dim1=1, dim2=2), "tnn", free="t")
TABLE.add("diag_embed", torch.diag_embed, "tn", free="t")
TABLE.add("trace", torch.trace, "nn")
TABLE.add("meshgrid", lambda x, y: torch.meshgrid(x, y, indexing="ij"), "n", "m")
TABLE.add("pad_constant", lambda x: F.pad(x, (1, 1)), "nm", free="n")
TABLE.add("pad_constant_0", lambda x: F.pad(x, (0, 0, 1, 2)), "nm", free="m")
for _mode in ("reflect", "replicate", "circular"):
    TABLE.add(f"pad1d_{_mode}", lambda x, _m=_mode: F.pad(x, (1, 1), mode=_m), "ncl", free="nc")
    TABLE.add(f"pad2d_{_mode}", lambda x, _m=_mode: F.pad(x, (1, 1, 2, 1), mode=_m), "nchw", free="nc")
