"""Snapshots: states are copied while the job trains on, and saved from the copy. `snapshot.py` begins it."""
