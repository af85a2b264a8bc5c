"""`Batches`, the batches of a plain DataLoader with the position in them: a resumed run goes on amid an epoch."""
