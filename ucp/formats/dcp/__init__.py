"""torch.distributed.checkpoint folders: FSDP2, DTensor, HSDP, DDP, torchtitan, Accelerate, HuggingFaceStorageWriter."""
