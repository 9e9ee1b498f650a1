"""The gradient log: every optimizer step of a run, as the gradients (or states) and scalars of that step.

A run's log consists of epochs (one parallel layout and optimizer each), an epoch of one stream per rank, a stream of
segment files, a segment of frames. `frames`, `payloads` and `codecs` are the format, `writer` and `reader` its two
sides. docs/spec/log.md specifies the format.
"""
