"""Where kernels of torch's are tried: in a thread that ends.

Torch's threads would else be the calling thread's for good, and a child that is forked from it, has
them not, and computes, would wait for them for ever. With AMX a thread keeps a kernel for each size
that it has seen, too.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


def tried_apart(threads: int, trial: Callable[..., bool], *given: Any) -> bool:
    """What `trial` tells of `given`, with as many of torch's threads; raises what it does."""
    with ThreadPoolExecutor(
        1, "pipeload-trial", initializer=torch.set_num_threads, initargs=(threads,)
    ) as apart:
        return apart.submit(trial, *given).result()
