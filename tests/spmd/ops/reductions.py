"""Reductions, scans, sorts and everything that looks along a dim."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.spmd.table import Table

TABLE = Table("reduction")

for _name in "sum mean prod amin amax min max argmin argmax std var logsumexp nansum nanmean any all".split():
    _grad = _name not in ("argmin", "argmax", "any", "all")
    if _name != "logsumexp":
        TABLE.add(f"{_name}_full", getattr(torch, _name), "ties:nm", grad=_grad)
    TABLE.add(f"{_name}_0", lambda x, _n=_name: _first(getattr(torch, _n)(x, 0)), "ties:nm", free="m", grad=_grad)
    TABLE.add(f"{_name}_-1", lambda x, _n=_name: _first(getattr(torch, _n)(x, -1)), "ties:nm", free="n", grad=_grad)
for _name in "sum mean amin amax logsumexp".split():
    TABLE.add(f"{_name}_keepdim", lambda x, _n=_name: getattr(torch, _n)(x, 1, keepdim=True), "ties:nmk", free="nk")
    TABLE.add(f"{_name}_dims", lambda x, _n=_name: getattr(torch, _n)(x, (0, 2)), "ties:nmk", free="m")
TABLE.add("logsumexp_full", lambda x: torch.logsumexp(x, (0, 1)), "nm")


def _first(value: object) -> object:
    return tuple(value) if isinstance(value, tuple) and not isinstance(value, torch.Tensor) else value


TABLE.add("aminmax", lambda x: tuple(torch.aminmax(x)), "ties:nm", grad=False)
TABLE.add("median_0", lambda x: tuple(torch.median(x, 0)), "nm", free="m")
TABLE.add("mode_0", lambda x: torch.mode(x, 0)[0], "ties:nm", free="m")
TABLE.add("kthvalue", lambda x: tuple(torch.kthvalue(x, 1, 0)), "nm", free="m")
TABLE.add("count_nonzero", torch.count_nonzero, "ties:nm", grad=False)
TABLE.add("std_mean", lambda x: tuple(torch.std_mean(x, 0)), "nm", free="m")
TABLE.add("var_mean", lambda x: tuple(torch.var_mean(x, 1)), "nm", free="n")
TABLE.add("var_biased", lambda x: torch.var(x, 0, unbiased=False), "nm", free="m")

for _order in (1.0, 2.0, 3.0, float("inf"), float("-inf"), 0.0):
    TABLE.add(f"vector_norm_{_order}", lambda x, _o=_order: torch.linalg.vector_norm(x, _o), "ties:nm")
    TABLE.add(
        f"vector_norm_dim_{_order}", lambda x, _o=_order: torch.linalg.vector_norm(x, _o, dim=0), "ties:nm", free="m"
    )
TABLE.add("norm_fro", torch.norm, "nm")
TABLE.add("F.normalize", lambda x: F.normalize(x, dim=1), "nm", free="n")
TABLE.add("cosine_similarity", lambda x, y: F.cosine_similarity(x, y, dim=1), "nm", "nm", free="n")
TABLE.add("pairwise_distance", F.pairwise_distance, "nm", "nm", free="n")
TABLE.add("dist", torch.dist, "nm", "nm")
TABLE.add("renorm", lambda x: torch.renorm(x, 2, 0, 1.0), "nm", free="n")

for _name in "cumsum cumprod logcumsumexp cummax cummin".split():
    for _dim in (0, 1, -1, -2):
        _free = "m" if _dim in (0, -2) else "n"
        TABLE.add(f"{_name}_{_dim}", lambda x, _n=_name, _d=_dim: _first(getattr(torch, _n)(x, _d)), "nm", free=_free)
TABLE.add("diff", lambda x: torch.diff(x, dim=0), "nm", free="m")
TABLE.add("trapezoid", lambda x: torch.trapezoid(x, dim=0), "nm", free="m")
TABLE.add("cov", torch.cov, "nm")
TABLE.add("corrcoef", torch.corrcoef, "nm")

for _dim, _free in ((0, "m"), (1, "n"), (-1, "n")):
    TABLE.add(f"softmax_{_dim}", lambda x, _d=_dim: torch.softmax(x, _d), "nm", free=_free)
    TABLE.add(f"log_softmax_{_dim}", lambda x, _d=_dim: torch.log_softmax(x, _d), "nm", free=_free)
TABLE.add("softmax_wide", lambda x: torch.softmax(x, 1), "nv", free="n")
TABLE.add("log_softmax_wide", lambda x: torch.log_softmax(x, 1), "nv", free="n")
TABLE.add("F.softmin", lambda x: F.softmin(x, 1), "nm", free="n")
TABLE.add("sort_0", lambda x: tuple(torch.sort(x, 0)), "nm", free="m")
TABLE.add("sort_1", lambda x: tuple(torch.sort(x, 1)), "nm", free="n")
TABLE.add("argsort_0", lambda x: torch.argsort(x, 0), "nm", free="m", grad=False)
TABLE.add("topk_0", lambda x: tuple(torch.topk(x, 2, 0)), "nm", free="m")
TABLE.add("topk_1", lambda x: tuple(torch.topk(x, 2, 1)), "nm", free="n")
TABLE.add("msort", torch.msort, "nm", free="m")
TABLE.add("unique", torch.unique, "ties:nm", grad=False)
TABLE.add("unique_all", lambda x: torch.unique(x, return_inverse=True, return_counts=True), "ties:nm", grad=False)
TABLE.add("unique_dim", lambda x: torch.unique(x, dim=0), "ties:nm", grad=False)
TABLE.add("unique_consecutive", torch.unique_consecutive, "ties:nm", grad=False)
TABLE.add("bincount", torch.bincount, "int:n<m", grad=False)
TABLE.add("bincount_weights", lambda i, w: torch.bincount(i, w, minlength=3), "int:n<m", "n", grad=False)
TABLE.add("histc", lambda x: torch.histc(x, 5, -2, 2), "nm", grad=False)
TABLE.add("searchsorted", lambda s, x: torch.searchsorted(s.sort().values, x), "m", "nm", grad=False)
TABLE.add("bucketize", lambda x, s: torch.bucketize(x, s.sort().values), "nm", "m", grad=False)
TABLE.add("allclose", torch.allclose, "nm", "nm", grad=False)
TABLE.add("equal", lambda x: torch.equal(x, x.clone()), "nm", grad=False)
TABLE.add("tolist", lambda x: torch.tensor(x.tolist()), "nm", grad=False)
TABLE.add("item", lambda x: torch.tensor(x.sum().item()), "nm", grad=False)
TABLE.add("float", lambda x: torch.tensor(float(x.sum())), "nm", grad=False)
TABLE.add("bool", lambda x: torch.tensor(bool(x.sum() > 0)), "nm", grad=False)
TABLE.add("int_of", lambda x: torch.tensor(int(x.sum() * 10)), "nm", grad=False)
TABLE.add("item_first", lambda x: torch.tensor(x[0, 0].item()), "nm", grad=False)
TABLE.add("cdist", torch.cdist, "nm", "cm")
TABLE.add("quantile", lambda x: torch.quantile(x, 0.4, dim=0), "nm", free="m")
