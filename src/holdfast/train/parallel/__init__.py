"""A model on a layout: meshes, sharding, pipelines, experts, gradients."""
