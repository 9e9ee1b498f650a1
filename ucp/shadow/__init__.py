"""A process beside a job that holds the state of its newest complete step: frames of the log in, a checkpoint out."""
