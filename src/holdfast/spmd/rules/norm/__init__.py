"""layer_norm, batch_norm and group_norm."""
