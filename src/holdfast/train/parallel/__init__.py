"""Parallelism of a model: meshes, sharding, pipelines, experts, gradients."""
