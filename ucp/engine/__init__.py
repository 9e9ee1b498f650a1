"""The engine: from a plan to published output. It knows no format.

`plan` describes a conversion as a value, `copy_tasks` cuts it into units of work, `pool` runs them in threads or
processes, and `worker` moves the bytes. A `destination` is written as one transaction: `staging` and `journal` for
local folders, `upload` for object stores. `convert` ties these together and coordinates the processes of a
launch; `work_shard` and `on_ray` let several processes share one conversion.
"""
