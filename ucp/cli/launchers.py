"""Launchers of many processes: which of how many this one is, as torchrun, srun and mpirun tell it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

from ucp.engine.shares import Share

# Variables of the rank and of the world, and one that only a launched process has: containers of training jobs set RANK
# and WORLD_SIZE for every shell, and Slurm sets SLURM_NTASKS for the batch script too.
_LAUNCHERS: Final = (
    ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"),  # torchrun
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_TASKS"),  # srun
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),  # mpirun of Open MPI
    ("PMI_RANK", "PMI_SIZE", "PMI_RANK"),  # mpirun of MPICH and Intel
)


def launched_share(environment: Mapping[str, str] = os.environ) -> Share | None:
    """This process's share of the work, where a launcher started several."""
    for rank, world, proof in _LAUNCHERS:
        if proof in environment and environment.get(rank, "").isdecimal() and environment.get(world, "").isdecimal():
            number, count = int(environment[rank]), int(environment[world])
            if count > 1 and number < count:
                return Share(number, count)
    return None
