"""Checkpoints of torch.distributed.checkpoint, which Megatron calls torch_dist."""
