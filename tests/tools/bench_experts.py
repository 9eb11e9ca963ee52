"""Times the int4 experts of one layer of Qwen3-30B-A3B's shape: together, and one by one.

    python tests/tools/bench_experts.py

Both take turns in one process, each time with other experts, so that weights come from where they
do in decoding. Medians in ms: on the wall, and of the processor in all threads. The last
column is what a call costs beside its products: that of a module of the same numbers of experts
and choices with almost no weights.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "hooks")]

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from pipeload.formats.integers.packed_experts import PackedExperts

PASSIVE = {"OMP_WAIT_POLICY": "passive"}
EXPERTS, ROUTED, GROUP = 128, 8, 64
ROWS = (1, 2, 4, 8, 16)


def main() -> None:
    """Print a line for each number of rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=100)
    options = parser.parse_args()
    if os.environ.get("OMP_WAIT_POLICY") != "passive":
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | PASSIVE)
    measure(options)


def measure(options: argparse.Namespace) -> None:
    """Under the environment that is set."""
    import torch

    from pipeload.formats.integers import packed_experts

    torch.set_num_threads(options.threads)
    layer, small = experts(2048, 768), experts(GROUP, GROUP)
    module: Any = packed_experts
    ways: dict[str, Callable[..., int]] = {
        "together": module.most_together,
        "one by one": lambda *_: 0,
    }
    print("rows  " + "  ".join(f"{way}: wall, cpu, beside" for way in ways))
    for rows in ROWS:
        times: dict[str, list[tuple[float, float, float]]] = {way: [] for way in ways}
        for _ in range(options.rounds):
            for way, chosen in ways.items():
                ids = torch.rand(rows, EXPERTS).topk(ROUTED, -1).indices
                module.most_together = chosen
                times[way].append((*timed(layer, ids), timed(small, ids)[1]))
        found = (
            [statistics.median(part) for part in zip(*times[way], strict=True)] for way in ways
        )
        print(f"{rows:4d}  " + "  ".join("{:.2f} {:.2f} {:.3f}".format(*part) for part in found))


def timed(module: PackedExperts, ids: torch.Tensor) -> tuple[float, float]:
    """ms on the wall, and of the processor."""
    import torch

    hidden = torch.randn(len(ids), module.shape.hidden, dtype=torch.bfloat16)
    weights = torch.rand(ids.shape)
    started, work = time.perf_counter(), time.process_time()
    with torch.no_grad():
        module(hidden, ids, weights)
    work = time.process_time() - work
    return 1e3 * (time.perf_counter() - started), 1e3 * work


def experts(hidden: int, inner: int) -> PackedExperts:
    """Random codes; all scales are alike."""
    import torch
    from transformers.models.qwen3_moe import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    from pipeload.formats.integers.expert_matrices import shape_of
    from pipeload.formats.integers.packed_experts import PackedExperts

    sizes: Any = {"hidden_size": hidden, "moe_intermediate_size": inner, "num_experts": EXPERTS}
    with torch.device("meta"):
        library = Qwen3MoeExperts(Qwen3MoeConfig(**sizes))
    shape = shape_of(library, 4, GROUP, "BF16")
    assert shape is not None
    module = PackedExperts(library, shape)
    packed = torch.randint(0, 256, (EXPERTS, shape.nbytes), dtype=torch.uint8)
    for place in shape.places:
        packed[:, place.told : place.stop].view(torch.bfloat16).fill_(0.01)
    module.packed.data = packed
    return module


if __name__ == "__main__":
    main()
