#!/usr/bin/env python3
"""What has to hold on a card. Each check is a function, in exactness.py or memory.py;
`test_card.py` gives them to pytest.

    python tests/gpu/checks.py [NAME ...]

Needs torch and transformers, no pytest and no network. Prints one line for each check; the status
is the number of those that failed.
"""

from __future__ import annotations

import logging
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "hooks"))

from tests.gpu import exactness, memory
from tests.gpu.card import Card, find_card

if TYPE_CHECKING:
    from collections.abc import Callable

CHECKS: dict[str, Callable[[Card], None]] = {
    check.__name__: check
    for check in (
        exactness.same_logits_and_tokens,
        exactness.same_perplexity,
        exactness.same_without_room_in_host_memory,
        exactness.generation_modes,
        exactness.experts,
        exactness.bitsandbytes_weights,
        exactness.every_block_has_its_own_weights,
        exactness.slow_kernels,
        memory.limits_hold,
        memory.another_limit,
        memory.a_pass_that_died,
        memory.what_fits_has_no_hooks,
        memory.removal,
        memory.nothing_is_left,
        exactness.another_stream,
    )
}
"""By name, in the order in which they run."""


def main(names: list[str]) -> int:
    """Run all, or those that are named."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # that it casts, at each product
    with tempfile.TemporaryDirectory() as scratch:
        card = find_card(Path(scratch))
        if card is None:
            print("no accelerator here (torch.accelerator.is_available()): nothing was checked")
            return 0
        failed = 0
        for name, function in CHECKS.items():
            if names and name not in names:
                continue
            started = time.perf_counter()
            try:
                function(card)
            except Exception:
                failed += 1
                traceback.print_exc(file=sys.stdout)
                print(f"FAILED {name} ({time.perf_counter() - started:.1f} s)", flush=True)
            else:
                print(f"ok     {name} ({time.perf_counter() - started:.1f} s)", flush=True)
            card.forget()
        return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
