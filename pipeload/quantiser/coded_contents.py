"""What becomes of a checkpoint whose integers are taken over, code for code."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from pipeload.checkpoint.headers import TensorEntry
from pipeload.errors import UnsupportedModelError
from pipeload.quantiser import model_card
from pipeload.quantiser.coded_source import open_coded
from pipeload.quantiser.coded_tensor import Kernel, as_floats, as_integers, cast
from pipeload.quantiser.contents import Contents, changed, with_head
from pipeload.quantiser.folder import Origin, copy_rest
from pipeload.quantiser.forms import PART_BYTES
from pipeload.quantiser.options import find_head
from pipeload.quantiser.tensor import ROUNDED_BYTES_PER_ITEM, Reading, items_at_once

if TYPE_CHECKING:
    import os

    from pipeload.hf.coded_checkpoint import CodedCheckpoint
    from pipeload.quantiser.forms import IntegerForm
    from pipeload.quantiser.options import Head
    from pipeload.quantiser.resumable_shards import Step

_BYTES_PER_ITEM = 16  # of a block: unpacked, in fp32, packed again
_ABOUT = (
    "Integers are those of the source, code for code; scales and zeros were rounded once, to the "
    "dtype above. Inputs are not quantised."
)


def coded_contents(
    pretrained: str | os.PathLike[str],
    dtype: str,
    head_form: IntegerForm | None,
    memory_limit: int | str | None,
    kwargs: dict[str, Any],
) -> Contents:
    """Find all that is to be written of a folder or hub id. Raises what `convert` does."""
    source = open_coded(pretrained, dtype, kwargs)
    chosen = source.choose()
    config = source.config(chosen, PART_BYTES)
    head = None if head_form is None else _take_head(source, head_form)
    if head is not None:
        with_head(config, head)
    kernel = Kernel(chosen.bits, chosen.group, config.order or "", chosen.reordered, source.dtype)
    reading = Reading(source.files, _items(memory_limit, source, head))
    parts = {name: config.parts(*source.coded[name].shape) for name in chosen.names}
    steps: list[Step] = []
    for one in source.in_order():
        if isinstance(one, TensorEntry):
            of = None if head is None or one.name != head.source else head
            if of is not None:
                step = of.form.step(replace(one, name=of.name), of.module, reading, None)
                steps.append(step)
            if of is None or of.is_tied:
                steps.append(cast(one, source.files, kernel.dtype))
        elif one.name in parts:
            steps.append(as_integers(one, kernel, parts[one.name], reading))
        else:
            steps.append(as_floats(one, reading, kernel.dtype))
    floats = model_card.Floats(
        {entry.name: math.prod(entry.shape) for entry in source.plain}
        | {name: math.prod(weight.shape) for name, weight in source.coded.items()},
        without={*chosen.names, *([] if head is None else [head.name])},
    )
    rest = partial(copy_rest, source.paths[0].parent, changed(config, kernel.dtype, head))
    return Contents(
        origin=Origin(pretrained, source.paths),
        title=source.format.title,
        config=config,
        dtype=kernel.dtype,
        head=head,
        steps=steps,
        integers=sum(map(len, parts.values())),
        floats=floats,
        source_bytes=source.total_bytes,
        about=_ABOUT,
        rest=rest,
    )


def _take_head(source: CodedCheckpoint, form: IntegerForm) -> Head:
    """The output head, which is to become that form.

    Raises:
        UnsupportedModelError: there is none that can be, or its integers are there already.
    """
    found = find_head(source.pending, form)
    if found.source in source.coded:
        raise UnsupportedModelError(
            f"the output head, {found.source!r}, is quantised already and becomes floats; integers "
            "of those would be rounded twice. Leave --head out."
        )
    return found


def _items(memory_limit: int | str | None, source: CodedCheckpoint, head: Head | None) -> int:
    """How many codes to convert, or numbers to round, at once. Raises what `items_at_once` does."""
    largest = max(source.coded.values(), key=lambda weight: weight.nbytes)
    columns = max(weight.shape[1] for weight in source.coded.values())
    item_bytes = _BYTES_PER_ITEM
    if head is not None:
        columns, item_bytes = max(columns, head.module.in_features), ROUNDED_BYTES_PER_ITEM
    held = 2 * largest.nbytes  # its tensors, statistics in fp32 among them
    what = f"converting {largest.name!r}"
    return items_at_once(memory_limit, columns, item_bytes, held=held, what=what, of="")
