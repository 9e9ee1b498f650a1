"""Published figures of other checkpointing systems, on their machines. None of them is measured here."""

from __future__ import annotations

from typing import Any

# Where the figures of LightCheck come from: the numbers behind figure 3 of the paper, in the authors' own repository.
LIGHTCHECK: dict[str, Any] = {
    "system": "LightCheck (ICCD 2023)",
    "source": "https://github.com/LighT-chenml/LightCheck, commit a5fb031, Source data/Figure_3.xlsx",
    "machine": "3 servers, each 2 × Xeon Gold 6230R, Tesla V100, 6 × 128 GB Optane DC, HDD, 100 Gb/s InfiniBand",
    "columns": ("LightCheck-D", "LightCheck-disk", "CheckFreq", "torch.save"),
    # Model, MB of a checkpoint; for every column: iterations between checkpoints (sheet 3a), overhead (3b, in percent).
    "rows": [
        ("ResNet-18", 90, (1, 2.0), (7, 2.0), (20, 4.0), (102, 3.7)),
        ("VGG-16", 1056, (6, 3.2), (64, 3.8), (146, 5.9), (904, 4.4)),
        ("Inception-V3", 183, (14, 4.0), (30, 4.4), (40, 5.2), (118, 6.4)),
        ("AlexNet", 467, (8, 2.1), (95, 4.2), (164, 4.5), (1084, 6.0)),
        ("GPT-2", 1508, (6, 1.8), (46, 2.6), (100, 4.9), (682, 5.1)),
        ("BERT", 4004, (10, 3.2), (82, 3.5), (200, 4.4), (1100, 4.4)),
    ],
}

# Claims of abstracts, if the tables are not available.
CLAIMS = [
    {
        "system": "CheckFreq (FAST 2021)",
        "how": "two phases, tuned frequency; several models and GPUs",
        "says": "overhead within 3.5 %",
        "source": "https://www.usenix.org/conference/fast21/presentation/mohan",
    },
    {
        "system": "Checkmate (2025)",
        "how": "shadow cluster, every iteration",
        "says": "5 to 34.5 × the frequency of others, 80 to 97.1 % less repeated work a failure",
        "source": "https://arxiv.org/abs/2507.13522",
    },
    {
        "system": "Checkflow (CAL 2025)",
        "how": "snapshot, then offload; every iteration",
        "says": "minimal or no slowdown where the link suffices",
        "source": "https://doi.org/10.1109/LCA.2025.3596616",
    },
]


def show_beside(result: dict[str, Any]) -> None:
    """LightCheck's table with our rows below it: how often a checkpoint may be taken, and what it costs then."""
    theirs = LIGHTCHECK
    print(f"{theirs['system']}: iterations between checkpoints, overhead\n  {theirs['source']}\n  {theirs['machine']}")
    print(f"  {'':28}{'MB':>6}" + "".join(f"{name:>20}" for name in theirs["columns"]))
    for model, size, *cells in theirs["rows"]:
        print(f"  {model:28}{size:6d}" + "".join(f"{every:>11d}  {percent:5.1f} %" for every, percent in cells))
    rows = result["rows"]
    ours = ("snapshots into a store, every step", "snapshots, every step", "two-phase (CheckFreq), every step")
    cells_of = [rows[name]["every_for_5_percent"] for name in (*ours, "torch.save, every step")]
    label = f"ours, {result['parameters'] / 1e6:.1f} M parameters"
    print(f"  {label:28}{result['state_bytes'] / 1e6:6.0f}" + "".join(f"{every:>11d}  ≤   5 %" for every in cells_of))
    print(
        f"  ours on {result['machine']['cpu']}, {result['machine']['cpus']} cores, columns: store, folders, two phases,"
        " torch.save; the frequency follows from the cost of one, see the row that was measured at it"
    )
    for each in CLAIMS:
        print(f"  {each['system']}: {each['how']}: {each['says']}\n    {each['source']}")
