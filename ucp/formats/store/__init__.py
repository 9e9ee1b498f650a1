"""Mapped stores (`ucp.store`) as checkpoints: what an index says, kept in the store's JSON. See docs/store.md."""
