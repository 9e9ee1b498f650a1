"""Mapped stores, written from a job and loaded without copying: `ucp.Store`, `ucp.StoreSchema`, `ucp.load_store`.

Specified in docs/store.md. `ucp.formats.store` has the file layout, and reads stores as checkpoints.
"""
