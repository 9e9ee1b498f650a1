"""States after any step of a logged run, computed from a base and the log (`at_step`).

`replay_index` finds the optimizer tensors of a log in the base, `replayer` computes their chunks with `kernels`, and
the result is a `Checkpoint` whose files are computed when they are read.
"""
