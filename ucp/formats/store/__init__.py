"""Mapped stores as checkpoints: the file layout, and reading its newest complete generation. See docs/store.md."""
