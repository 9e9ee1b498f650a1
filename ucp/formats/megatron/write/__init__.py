"""Writers of Megatron checkpoints.

`target_job` computes the arguments of the job that will load the checkpoint, `target_model` the tensors of its ranks,
`target_optimizer` their optimizers. `legacy_writer` and `torch_dist_writer` lay out the files.
"""
