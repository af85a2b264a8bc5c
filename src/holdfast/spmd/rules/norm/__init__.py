"""layer_norm, batch_norm, group_norm and weight_norm."""
