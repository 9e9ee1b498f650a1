"""The shadow: a separate process that follows a job's log frames and holds the state of its newest complete step.

`sink.py` is the job's side of a connection and `server.py` the shadow's; `protocol.py` and `transports.py` carry bytes
between them. `step_assembler.py` turns frames into steps, `shadow.py` applies them to a `ShadowState`, and
`shadow_checkpoint.py` and `client.py` make a checkpoint of it.
"""
