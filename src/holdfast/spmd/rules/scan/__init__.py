"""cumsum, cumprod, cummax, logcumsumexp."""
