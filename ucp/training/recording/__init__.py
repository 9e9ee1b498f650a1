"""Recording: write the input of every optimizer step to a log, from a background thread. Start at `recorder.py`."""
