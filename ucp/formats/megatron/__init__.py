"""Megatron-LM and megatron-core checkpoints: the legacy `torch` layout, `torch_dist`, `torch_dcp`, and `zarr`.

`read/` and `write/` share what this folder knows about a job: its arguments (`job_arguments`), the names, order and
rules of parameters (`mcore_modules`), what each rank holds (`rank_layout`), groups of optimizers (`optimizer_groups`),
and everything that is not a parameter (`job_extras`).
"""
