"""Which keys of DeepSpeed's model files are not the user's: all others are client state."""

from __future__ import annotations

from typing import Final

RESERVED: Final = frozenset(
    {
        *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments"),
        *("shared_params", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names"),
        *("skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size", "ds_config"),
        *("ds_version", "checkpoint_parallel_dimensions", "num_experts", "ds_autoep_layers", "autoep_layers"),
    }
)
