"""The mapping language: parse, check, compile to box algebra. Pure: no input or output, no torch."""
