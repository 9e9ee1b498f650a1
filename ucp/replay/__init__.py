"""Replay: the state of a training job at any step, computed from an older checkpoint and the log of its gradients."""
