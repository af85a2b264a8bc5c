"""Programs that dense decoder families share (fused, Megatron, Paddle), put together from statements.py."""

from __future__ import annotations

from holdfast.mapping.families import statements as text

FUSED = text.FUSED_QKV + text.FUSED_MLP
FUSED_GROUPED = text.GROUPED_QKV + text.FUSED_MLP
MEGATRON = (
    text.MEGATRON_ENDS
    + text.MEGATRON_INPUT_NORM
    + text.MEGATRON_ATTENTION
    + text.MEGATRON_DENSE_NORM
    + text.MEGATRON_MLP
)
MEGATRON_LOCAL = text.MEGATRON_ENDS + text.MEGATRON_LOCAL_NORMS + text.MEGATRON_ATTENTION + text.MEGATRON_MLP
MEGATRON_DIST = text.MEGATRON_ENDS + text.MEGATRON_DIST_ATTENTION + text.MEGATRON_DIST_MLP
PADDLE = text.PADDLE_ATTENTION + text.PADDLE_MLP
PADDLE_FUSED = text.PADDLE_FUSED_ATTENTION + text.PADDLE_FUSED_MLP
