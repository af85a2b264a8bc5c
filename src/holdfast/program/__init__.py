"""The model as a program: a graph of aten operators as plain data, its strict JSON, checks, counts. No torch."""
