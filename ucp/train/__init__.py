"""What runs inside a training job: load a checkpoint into live ranks, save atoms from them, record, take snapshots."""
