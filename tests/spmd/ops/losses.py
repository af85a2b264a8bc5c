"""Losses with every reduction, and what trains: optimizers, clipping, random numbers."""

from __future__ import annotations

import torch.nn.functional as F

from tests.spmd.table import Table

TABLE = Table("loss")
REDUCTIONS = ("mean", "sum", "none")

for _how in REDUCTIONS:
    _free = "nm" if _how == "none" else ""
    for _name in "mse_loss l1_loss smooth_l1_loss huber_loss".split():
        TABLE.add(
            f"{_name}_{_how}",
            lambda x, y, _n=_name, _h=_how: getattr(F, _n)(x, y, reduction=_h),
            "nm",
            "nm",
            free=_free,
        )
    TABLE.add(
        f"bce_{_how}",
        lambda x, y, _h=_how: F.binary_cross_entropy(x, y.detach(), reduction=_h),
        *("unit:nm", "unit:nm"),
        free=_free,
    )
    TABLE.add(
        f"bce_logits_{_how}",
        lambda x, y, _h=_how: F.binary_cross_entropy_with_logits(x, y.detach(), reduction=_h),
        *("nm", "unit:nm"),
        free=_free,
    )
    TABLE.add(
        f"soft_margin_{_how}",
        lambda x, y, _h=_how: F.soft_margin_loss(x, y.detach().sign(), reduction=_h),
        *("nm", "nm"),
        free=_free,
    )
    TABLE.add(
        f"kl_div_{_how}",
        lambda x, y, _h=_how: F.kl_div(x.log_softmax(1), y, reduction=_h),
        *("nm", "unit:nm"),
        free="n" if _how == "none" else "",
    )
    TABLE.add(f"poisson_nll_{_how}", lambda x, y, _h=_how: F.poisson_nll_loss(x, y, reduction=_h), "nm", "positive:nm")
    TABLE.add(
        f"gaussian_nll_{_how}",
        lambda x, y, v, _h=_how: F.gaussian_nll_loss(x, y, v, reduction=_h),
        *("nm", "nm", "positive:nm"),
    )
    TABLE.add(
        f"hinge_embedding_{_how}",
        lambda x, y, _h=_how: F.hinge_embedding_loss(x, y.detach().sign(), reduction=_h),
        *("nm", "nm"),
    )
    TABLE.add(
        f"margin_ranking_{_how}",
        lambda x, y, z, _h=_how: F.margin_ranking_loss(x, y, z.detach().sign(), reduction=_h),
        *("nm", "nm", "nm"),
    )
    TABLE.add(
        f"cosine_embedding_{_how}",
        lambda x, y, z, _h=_how: F.cosine_embedding_loss(x, y, z.detach().sign(), reduction=_h),
        *("nm", "nm", "n"),
    )
    TABLE.add(
        f"triplet_{_how}", lambda x, y, z, _h=_how: F.triplet_margin_loss(x, y, z, reduction=_h), "nm", "nm", "nm"
    )
    TABLE.add(f"cross_entropy_{_how}", lambda x, t, _h=_how: F.cross_entropy(x, t, reduction=_h), "nc", "int:n<c")
    TABLE.add(f"cross_entropy_wide_{_how}", lambda x, t, _h=_how: F.cross_entropy(x, t, reduction=_h), "nv", "int:n<v")
    TABLE.add(
        f"cross_entropy_ignore_{_how}",
        lambda x, t, _h=_how: F.cross_entropy(x, t, ignore_index=1, reduction=_h),
        *("nc", "int:n<c"),
    )
    TABLE.add(
        f"cross_entropy_weight_{_how}",
        lambda x, t, w, _h=_how: F.cross_entropy(x, t, w.detach(), reduction=_h),
        *("nc", "int:n<c", "positive:c"),
    )
    TABLE.add(
        f"cross_entropy_smooth_{_how}",
        lambda x, t, _h=_how: F.cross_entropy(x, t, label_smoothing=0.1, reduction=_h),
        *("nc", "int:n<c"),
    )
    TABLE.add(
        f"cross_entropy_soft_{_how}", lambda x, y, _h=_how: F.cross_entropy(x, y.softmax(1), reduction=_h), "nc", "nc"
    )
    TABLE.add(
        f"cross_entropy_2d_{_how}", lambda x, t, _h=_how: F.cross_entropy(x, t, reduction=_h), "nchw", "int:nhw<c"
    )
    TABLE.add(f"nll_loss_{_how}", lambda x, t, _h=_how: F.nll_loss(x, t, reduction=_h), "nc", "int:n<c")
    TABLE.add(
        f"nll_ignore_{_how}", lambda x, t, _h=_how: F.nll_loss(x, t, ignore_index=0, reduction=_h), "nc", "int:n<c"
    )
    TABLE.add(f"multi_margin_{_how}", lambda x, t, _h=_how: F.multi_margin_loss(x, t, reduction=_h), "nc", "int:n<c")
    TABLE.add(
        f"multilabel_soft_margin_{_how}",
        lambda x, y, _h=_how: F.multilabel_soft_margin_loss(x, y.detach(), reduction=_h),
        *("nc", "unit:nc"),
    )
TABLE.add(
    "bce_weight_mean",
    lambda x, y, w: F.binary_cross_entropy(x, y.detach(), w.detach()),
    "unit:nm",
    "unit:nm",
    "positive:nm",
)
TABLE.add(
    "bce_logits_pos_weight",
    lambda x, y, w: F.binary_cross_entropy_with_logits(x, y.detach(), pos_weight=w.detach()),
    *("nm", "unit:nm", "positive:m"),
)
TABLE.add("kl_div_batchmean", lambda x, y: F.kl_div(x.log_softmax(1), y, reduction="batchmean"), "nm", "unit:nm")
