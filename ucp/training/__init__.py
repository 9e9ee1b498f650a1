"""Code that runs inside or next to a training job: load a checkpoint into it, save from it, record its steps.

`adapters.py` describes any job as a `LiveJob`; `load.py`, `save.py`, `recording/` and `snapshots/` work on that
description alone. `shadow/` is a separate process that follows a job; `store.py` is a checkpoint file updated in place.
"""
