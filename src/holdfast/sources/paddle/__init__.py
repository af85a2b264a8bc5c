"""Paddle checkpoints: unified, flex, pdparams and pdiparams."""
