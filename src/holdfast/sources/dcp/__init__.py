"""Checkpoints of torch.distributed.checkpoint, called torch_dist by Megatron."""
