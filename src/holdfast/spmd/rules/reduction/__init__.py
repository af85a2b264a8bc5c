"""min, max, argmin, argmax, means, variances, norms, logsumexp."""
