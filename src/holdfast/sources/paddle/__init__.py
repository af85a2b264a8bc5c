"""Checkpoints of Paddle: unified, flex, pdparams and pdiparams."""
