"""DeepSpeed checkpoints: ZeRO 0 to 3, BF16_Optimizer, tensor, pipeline and expert parallelism, and their wrappers."""
