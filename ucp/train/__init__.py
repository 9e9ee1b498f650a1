"""What runs inside a training job: loading a checkpoint into live ranks, and saving atoms from them."""
