"""sharded."""
