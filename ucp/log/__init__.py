"""The gradient log: what happened since a base, step by step, in append-only files. Knows no torch."""
