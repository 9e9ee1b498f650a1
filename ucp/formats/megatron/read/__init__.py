"""Readers of Megatron checkpoints.

`reader` chooses the layout. The legacy layout: `legacy_layout` puts what `legacy_files` finds into a shard table.
Sharded layouts: `sharded_containers` lists tensors and objects, `sharded_tensors` takes parameters out of stacked
tensors, `sharded_parameters` adds optimizer buffers, groups and steps, `bucket_shift_bug` repairs a bug of Megatron.
"""
