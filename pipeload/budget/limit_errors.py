"""What is said where a limit is too small, the process's or a device's. All figures in bytes.

Who finds that a limit is too small hands in what it counted; the words stand here. Functions are in
the order of a model's life: planned, run, given another limit, taken down.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pipeload._sizes import format_least, format_size, show_limit
from pipeload.errors import MemoryLimitError
from pipeload.weights.arena import DTYPES

if TYPE_CHECKING:
    from pipeload.budget.ledger import TooLarge
    from pipeload.budget.make_plan import CostedCut
    from pipeload.budget.measured_host import Measured
    from pipeload.budget.pass_needs import PassNeeds
    from pipeload.budget.pass_shape import PassShape
    from pipeload.budget.plan_options import Options

_SMALLEST_CHUNK = 16  # tokens: each chunk reads the whole model


class PassMemoryLimitError(MemoryLimitError, torch.OutOfMemoryError):
    """A pass does not fit within the limit.

    Searches for a batch size catch torch's own error, or a RuntimeError that speaks of being out of
    memory. Not made where the other errors are: they are there without torch.
    """


# -- a plan ----------------------------------------------------------------------------------------


def process_too_small(
    limit: int, smallest: int, cut: CostedCut, *, floor: int, reserve: int, more: str
) -> MemoryLimitError:
    """No plan fits the process's limit: sizes that add up to the smallest one that works.

    Args:
        limit: the limit that was asked for.
        smallest: the smallest one that works.
        cut: how the model would be cut then.
        floor: what the process holds already.
        reserve: what is kept free for passes.
        more: `uncut` and `origin` of it.
    """
    largest = max(cut.parts.specs, key=lambda spec: sum(w.nbytes for w in spec.weights))
    pinned, buffers = cut.costs.pinned, cut.residency.smallest
    rest = smallest - floor - reserve - pinned - buffers
    return MemoryLimitError(
        f"memory_limit={show_limit(limit)} is too small. This process holds "
        f"{format_size(floor)} already, a pass needs {format_size(reserve)}, weights that are "
        f"always resident take {format_size(pinned)}, two buffers for the largest unit, "
        f"{largest.name!r}, {format_size(buffers)}, and all else "
        f"{format_size(rest)}. The smallest limit that works here is {smallest} bytes "
        f"({format_least(smallest)}); fewer tokens or sequences at once (tokens=, batch=) lower "
        f"it.{more}",
        limit=limit,
        smallest_limit=smallest,
    )


def device_too_small(
    limit: int, smallest: int, name: str, *, floor: int, reserve: int, pinned: int
) -> MemoryLimitError:
    """No plan fits the limit of the device `name`.

    Args:
        limit: the limit that was asked for.
        smallest: the smallest one that works.
        name: the device's.
        floor: what is in use on it already.
        reserve: what is kept free for passes.
        pinned: weights that are always there.
    """
    return MemoryLimitError(
        f"memory_limit={show_limit(limit)} of {name} is too small. "
        f"{format_size(floor)} are in use there, a pass needs {format_size(reserve)}, "
        f"embeddings, head and small weights take {format_size(pinned)}, and two buffers for "
        f"the largest block must fit. Set at least {smallest} bytes ({format_least(smallest)}); "
        "fewer tokens or sequences at once (tokens=, batch=) lower that.",
        limit=limit,
        smallest_limit=smallest,
        device=name,
    )


def staging_too_large(
    limit: int, smallest: int, *, floor: int, staging: int, more: str
) -> MemoryLimitError:
    """Beside `floor`, host memory does not hold the staging of a plan for a device."""
    return MemoryLimitError(
        f"host_memory_limit={show_limit(limit)} is too small. This process holds "
        f"{format_size(floor)} already, and the staging between disk and device takes "
        f"{format_size(staging)}. Set at least {smallest} bytes ({format_least(smallest)}); "
        f"with a larger memory_limit less is enough.{more}",
        limit=limit,
        smallest_limit=smallest,
    )


def origin(options: Options, measured: Measured) -> str:
    """What a limit is made of that nobody named."""
    if not options.found_out:
        return ""
    return (
        f' Nobody named it: "auto" leaves a part of the {format_size(measured.allowed_bytes)} that '
        "this process may use to everything else; name one to use more."
    )


def uncut(cut: CostedCut, threads: int) -> str:
    """What could be smaller on another processor."""
    weights = [w for spec in cut.parts.specs for w in spec.weights if w.name in cut.parts.uncut]
    if not weights:
        return ""
    largest = max(weights, key=lambda weight: weight.nbytes)
    return (
        f" {largest.name!r} ({format_size(largest.nbytes)}) is read as a whole: with the kernels "
        f"that this processor has for {DTYPES[largest.dtype]} and {threads} "
        "threads, ranges of its rows would give other bits. Another dtype= or number of threads "
        "may let it be cut."
    )


def whole_model_too_large(limit: int, name: str, nbytes: int, held: int) -> MemoryLimitError:
    """A model of which nothing can be streamed does not fit beside what the process holds."""
    return MemoryLimitError(
        f"{name} has nothing that could be streamed, and takes {format_size(nbytes)} "
        f"beside {format_size(held)} in use, over the limit of {limit} bytes. Set at least "
        f"{held + nbytes} bytes.",
        limit=limit,
        smallest_limit=held + nbytes,
    )


# -- a pass ----------------------------------------------------------------------------------------


def pass_too_large(
    found: TooLarge,
    needs: PassNeeds,
    limit: int,
    *,
    device: str | None = None,
    chunk: int = 0,
    grown: int = 0,
) -> PassMemoryLimitError:
    """A pass does not fit even with nothing resident.

    Args:
        found: the pass, and what it needs.
        needs: tells what would fit.
        limit: the limit in force.
        device: whose limit that is; None: the process's.
        chunk: tokens of a prompt that would fit at once.
        grown: what the process holds beside the model that was not planned.
    """
    shape, need, left, wanted = found
    free = max(0, left)
    on = f" on {device}" if device else ""
    cures = f"A limit of {wanted} bytes ({format_size(wanted)}) makes it fit"
    if chunk >= _SMALLEST_CHUNK:
        cures += (
            f", and so does prefill_chunk_size={chunk} in generate(), which may change the "
            "last bits"
        )
    if grown > 0:
        cures = (
            f"Beside the model the process holds {grown} bytes ({format_size(grown)}) more "
            f"than was planned when it was loaded: free what you can. {cures}"
        )
    return PassMemoryLimitError(
        f"this pass ({shape}) needs {need} bytes ({format_size(need)}){on} beside the weights, and "
        f"with nothing resident {free} ({format_size(free)}) are free within "
        f"memory_limit={limit}: it would run out of memory. What fits: "
        f"{_largest(needs, left, shape)}. {cures}.",
        limit=limit,
        smallest_limit=wanted,
        device=device,
    )


def request_too_large(limit: int, tokens: int, need: int, free: int) -> MemoryLimitError:
    """A request of so many tokens, prompt and answer, fits in no pass, whatever else runs."""
    more = need - free
    return MemoryLimitError(
        f"a prompt and answer of {tokens} tokens take {format_size(more)} more than the "
        f"{format_size(max(0, free))} that are free within memory_limit={limit}. Give a shorter "
        "prompt or ask for fewer tokens.",
        limit=limit,
        smallest_limit=limit + more,
    )


def _largest(needs: PassNeeds, free: int, shape: PassShape) -> str:
    """The passes of `free` bytes that are most like one of `shape`."""
    batch = needs.largest_batch(free, shape.tokens + shape.cached)
    if shape.sizes:  # how much of what it is may be left out is for the model to know
        return f"the largest batch that fits of the usual size is {batch}"
    tokens = needs.longest_tokens(free, shape.batch)
    return (
        f"the longest prompt that fits at this batch is {tokens} tokens, the largest batch at "
        f"this length {batch}"
    )


def weight_needed_whole(name: str, nbytes: int, limit: int, wanted: int) -> MemoryLimitError:
    """Inside a pass, the weight of module `name` does not fit as a whole."""
    return MemoryLimitError(
        f"the forward of {name!r} was replaced after loading, so its weight is needed "
        f"as a whole: {nbytes} bytes ({format_size(nbytes)}) that memory_limit={limit} "
        f"does not leave. Set a limit of at least {wanted} bytes "
        f"({format_size(wanted)}), or replace it before pipeload.wrap(model).",
        limit=limit,
        smallest_limit=wanted,
    )


def table_needed_whole(name: str, limit: int, need: int) -> MemoryLimitError:
    """The process would hold `need` with all rows of an embedding table."""
    return MemoryLimitError(
        f"the model uses the table {name!r} as a whole, which takes it to "
        f"{format_size(need)}, over the limit of {limit} bytes. Set at least {need}.",
        limit=limit,
        smallest_limit=need,
    )


# -- another limit, and the end --------------------------------------------------------------------


def new_limit_too_small(limit: int, smallest: int, device: str | None) -> MemoryLimitError:
    """Another limit does not hold a model that streams; `device`: None for the process's."""
    of = f" of {device}" if device else ""
    # Blocks stay whole on a device.
    cure = "" if device else " Loaded again, it may be cut more finely and take less."
    return MemoryLimitError(
        f"memory_limit={limit} bytes ({format_size(limit)}){of} is too small for this model as "
        f"it was loaded; {smallest} bytes ({format_least(smallest)}) work now.{cure}",
        limit=limit,
        smallest_limit=smallest,
        device=device,
    )


def new_limit_below_staging(limit: int, smallest: int, device: str) -> MemoryLimitError:
    """Another limit of the process does not hold the staging of a model on a device."""
    return MemoryLimitError(
        f"host_memory_limit={limit} bytes ({format_size(limit)}) is too small for the "
        f"staging of a model that streams to {device}. Set at least "
        f"{smallest} bytes ({format_least(smallest)}).",
        limit=limit,
        smallest_limit=smallest,
    )


def removal_too_large(
    limit: int, need: int, held: int, device: str | None = None
) -> MemoryLimitError:
    """`remove()` would hold `need` beside `held`; `device`: None for the process's memory."""
    what = f"weights on {device}" if device else "cast or converted weights"
    return MemoryLimitError(
        f"remove() must hold {format_size(need)} of {what} beside {format_size(held)} in use, over "
        f"the limit of {limit} bytes. The model still streams; load it with at least "
        f"{held + need} bytes.",
        limit=limit,
        smallest_limit=held + need,
        device=device,
    )


def removal_on_ranks_too_large(limit: int, need: int, held: int) -> MemoryLimitError:
    """`remove()` would hold `need` beside `held`, with what other ranks have had until now."""
    return MemoryLimitError(
        f"remove() must hold {format_size(need)} of cast or converted weights, with those of "
        f"other ranks, beside {format_size(held)} in use, over the limit of {limit} bytes. Delete "
        "the model (`del model`) and load it again, with ranks or without; remove() has room with "
        f"at least {held + need} bytes.",
        limit=limit,
        smallest_limit=held + need,
    )


def no_room_on_a_rank(rank: str, text: str, limit: int, smallest: int) -> MemoryLimitError:
    """Another rank's limit does not hold the pass: a request meets here what it meets there."""
    return MemoryLimitError(
        f"{rank} has no room for the pass: {text} Raise the limit of that rank, or ask for fewer "
        "tokens at once.",
        limit=limit,
        smallest_limit=smallest,
    )


# -- a checkpoint that is made ---------------------------------------------------------------------


def making_too_large(limit: int, smallest: int, what: str, of: str) -> MemoryLimitError:
    """Making a checkpoint, "quantising" it for one, needs more; `of`: for what, in words."""
    return MemoryLimitError(
        f"{what} needs {format_least(smallest)}{of}, over the limit of {limit} bytes. Set at least "
        f"{smallest} bytes.",
        limit=limit,
        smallest_limit=smallest,
    )
