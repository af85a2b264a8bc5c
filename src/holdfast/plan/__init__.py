"""Who moves which bytes, as frozen values. Pure: no input or output, no torch."""
