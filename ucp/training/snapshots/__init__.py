"""Snapshots: copy the state of a job in the background while it trains, and save the copy. Start at `snapshot.py`."""
