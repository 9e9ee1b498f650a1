"""Megatron-LM and megatron-core checkpoints: the legacy `torch` layout, `torch_dist`, and `zarr` of older releases."""
