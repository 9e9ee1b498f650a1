"""Writing DeepSpeed's own files: which rank holds what in the target layout, and the trees that say so."""
