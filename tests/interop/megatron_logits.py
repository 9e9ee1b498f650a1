"""Megatron-core models of one rank read legacy rank files and say what they compute, in single precision.

`python -m tests.interop.megatron_logits STORE TOKENS FOLDER…`: TOKENS is a file of `torch.save` with a batch of tokens,
every FOLDER that of an iteration; the file `logits` is written into it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from tests.interop import megatron_on_cpu


def main(store: str, tokens: Path, folders: list[Path]) -> None:
    megatron_on_cpu.install()
    torch.cuda.random.get_rng_state = torch.cuda.get_rng_state  # attention draws numbers, and throws them away
    torch.cuda.current_stream = torch.cuda.Stream  # experts wait for it, and for what it records
    torch.cuda.Stream.record_event = lambda stream: stream
    dist.init_process_group(backend="gloo", init_method=f"file://{store}", rank=0, world_size=1)
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer.moe import moe_utils

    vars(moe_utils).setdefault("te_general_gemm", None)  # Transformer Engine's, which is not there
    megatron_on_cpu.allow_latent_attention()
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(7)
    ids = torch.load(tokens)
    for folder in folders:
        torch.save(compute(folder, ids), folder / "logits")
    dist.destroy_process_group()


def compute(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    """What the model in a folder makes of the tokens."""
    from tests.interop.megatron_rank import build_model

    saved = torch.load(folder / "mp_rank_00" / "model_optim_rng.pt", weights_only=False)
    model = build_model(saved["args"], 0, 1).float()
    for module in model.modules():
        if hasattr(module, "input_in_float16"):  # softmax rounds what it gives
            module.input_in_bf16 = module.input_in_float16 = False
    missing, unexpected = model.load_state_dict(saved["model"], strict=False)
    wrong = [name for name in (*missing, *unexpected) if not name.endswith("_extra_state")]
    if wrong:
        raise SystemExit(f"not the parameters of this model: {wrong}")
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    masked = torch.ones(1, 1, ids.shape[1], ids.shape[1]).triu(1) > 0
    with torch.no_grad():
        return model.eval()(ids, positions, masked)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), [Path(folder) for folder in sys.argv[3:]])
