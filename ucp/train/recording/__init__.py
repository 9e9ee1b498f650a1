"""Recording: what each optimizer step is given goes into a log, from a thread of its own. `record.py` begins it."""
