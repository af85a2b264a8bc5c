"""Programs that families with experts share (fused, stacked, Megatron, Paddle), put together from statements.py."""

from __future__ import annotations

from holdfast.mapping.families import statements as text

FUSED = text.FUSED_QKV + text.FUSED_MLP + text.FUSED_EXPERTS
FUSED_GROUPED = text.GROUPED_QKV + text.FUSED_MLP + text.FUSED_EXPERTS
STACKED = text.STACKED_EXPERTS
_MEGATRON = (
    text.MEGATRON_ENDS
    + text.MEGATRON_INPUT_NORM
    + text.MEGATRON_ATTENTION
    + text.MEGATRON_DENSE_NORM
    + text.MEGATRON_MOE_NORM
    + text.MEGATRON_MLP
    + text.MEGATRON_ROUTER
)
MEGATRON = _MEGATRON + text.MEGATRON_GROUPED_EXPERTS
MEGATRON_LOCAL = (
    text.MEGATRON_ENDS
    + text.MEGATRON_LOCAL_NORMS
    + text.MEGATRON_ATTENTION
    + text.MEGATRON_MLP
    + text.MEGATRON_ROUTER
    + text.MEGATRON_LOCAL_EXPERTS
)
MEGATRON_DIST = text.MEGATRON_ENDS + text.MEGATRON_DIST_ATTENTION + text.MEGATRON_DIST_MOE
MEGATRON_DIST_LAYERS = _MEGATRON + text.MEGATRON_STORED_EXPERTS
PADDLE = text.PADDLE_ATTENTION + text.PADDLE_MLP + text.PADDLE_EXPERTS
PADDLE_FUSED = text.PADDLE_FUSED_ATTENTION + text.PADDLE_FUSED_MLP + text.PADDLE_FUSED_EXPERTS
