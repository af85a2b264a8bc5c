"""The page of runs and checkpoints: `holdfast serve` and `holdfast report`. Never imports torch.

An asyncio server of one thread speaks HTTP (`http_server`); a few worker threads answer requests (`api`);
long work runs as jobs (`page_jobs`). Everything is read through the same modules as the command line's.
"""
