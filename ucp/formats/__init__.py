"""Checkpoint formats, one folder each. A format knows nothing of any other; `registry` lists them."""
