"""What formats with one file per rank share: from the shards of ranks to atoms, and from atoms to the slices of ranks.

Reading goes through these modules in this order:

1. A format fills a `ShardTable` (`shard_table`) with what each rank stores of each parameter (`shard_fragments`).
2. Every parameter gets a tensor-parallel rule: from the user (`rule_files`), from the format, or inferred from bytes,
   shapes and names (`rule_inference`). `slot_matching` names the slots of optimizers that number their parameters.
3. `assembly` makes parameters of it, with atoms whose fragments are computed when they are iterated.

Writing uses `slicer`: the slice that each rank of the target holds of a parameter.
"""
