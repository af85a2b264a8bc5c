"""The private names of torch, and the values that every layer of holdfast.spmd shares."""
