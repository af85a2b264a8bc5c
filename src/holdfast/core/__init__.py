"""What every layer may use: errors and limits."""
