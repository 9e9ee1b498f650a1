"""What a training job is: frozen values, JSON in and out, so that they can be sent to the process that runs them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Spec:
    """A tiny GPT and how DeepSpeed is to train it. Sizes are odd on purpose: everything gets padded somewhere."""

    zero: int = 1
    dtype: str = "bf16"  # bf16, fp16, fp32
    tp: int = 1  # tensor parallel (Megatron style, our own layers)
    pp: int = 1  # pipeline stages; more than one makes a PipelineModule
    pipeline: bool = False  # a PipelineModule even with one stage
    experts: int = 0  # DeepSpeed-MoE in every second block
    ep: int = 1
    autotp: bool = False  # plain layers that DeepSpeed's AutoTP splits over `tp`, instead of our own
    autoep: bool = False  # the experts are those of a Hugging Face model that AutoEP spreads, not of DeepSpeed-MoE
    layers: int = 2
    hidden: int = 14
    heads: int = 2
    ffn: int = 26
    vocab: int = 53  # with tp > 1 padded to a multiple of 4 × tp, as Megatron does
    positions: int = 7
    tied: bool = True  # the head is the embedding
    swiglu: bool = False  # gate and up in one weight: two sub-parameters
    frozen: tuple[str, ...] = ()  # parameters whose name contains one of these are not trained
    last_norm: str = "ln_f"  # its name
    optimizer: str = "adamw"  # see OPTIMIZERS in model.py
    groups: int = 2  # 1: one; 2: with and without decay; 3: the 1-element `scale` on its own as well
    gas: int = 1  # gradient accumulation steps
    batch: int = 12  # sequences a step over all ranks; divides by dp 1, 2, 3, 4, 6
    seed: int = 1  # of the fresh weights
    data_seed: int = 7
    lr: float = 1e-2
    scheduler: bool = True  # an LR scheduler with a state of its own
    uc_info: bool = True  # client state carries `universal_checkpoint_info`
    exclude_frozen: bool = False  # save_checkpoint(exclude_frozen_parameters=…)
    zero_init: bool = False  # stage 3: build the model inside deepspeed.zero.Init
    config: dict[str, Any] = field(default_factory=dict)  # merged over the DeepSpeed configuration

    @property
    def is_pipeline(self) -> bool:
        return self.pipeline or self.pp > 1

    @property
    def padded_vocab(self) -> int:
        multiple = 4 * self.tp if self.tp > 1 else 1
        return -(-self.vocab // multiple) * multiple


@dataclass(frozen=True)
class Job:
    """One run of one world. Paths are strings."""

    spec: Spec
    world: int
    steps: int  # trained after loading
    out: str  # folder for what the ranks report
    save_dir: str | None = None  # checkpoint after the steps
    save_tag: str | None = None
    load_dir: str | None = None  # checkpoint before the steps
    load_tag: str | None = None
    universal: bool = False  # the loaded one is a universal folder
    export_loaded: bool = False  # write the state right after loading
    export_final: bool = True  # write the state after the steps
    steps_after: int = 0  # trained on after the save, for their losses

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        fields = json.loads(text)
        spec = Spec(**{**fields["spec"], "frozen": tuple(fields["spec"]["frozen"])})
        return cls(**{**fields, "spec": spec})
