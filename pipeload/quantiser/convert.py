"""Takes over the integers of a checkpoint that others have quantised, code for code."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeload._sizes import parse_size
from pipeload.checkpoint.headers import TensorEntry
from pipeload.errors import OptionError, UnsupportedModelError
from pipeload.formats.form_names import INT8
from pipeload.formats.integers.format import METHOD
from pipeload.quantiser import model_card
from pipeload.quantiser.coded_source import open_coded
from pipeload.quantiser.coded_tensor import Kernel, as_floats, as_integers, cast
from pipeload.quantiser.folder import Origin, complete, write_weights
from pipeload.quantiser.forms import HEAD_BITS, PART_BYTES
from pipeload.quantiser.options import find_head, make_head_form
from pipeload.quantiser.quantise import Made
from pipeload.quantiser.resumable_shards import Output, divide
from pipeload.quantiser.tensor import ROUNDED_BYTES_PER_ITEM, Reading, items_at_once

if TYPE_CHECKING:
    import os

    from pipeload.formats.integers.quantizer import PipeloadConfig
    from pipeload.hf.coded_checkpoint import CodedCheckpoint
    from pipeload.quantiser.folder import Progress
    from pipeload.quantiser.forms import Form
    from pipeload.quantiser.options import Head
    from pipeload.quantiser.resumable_shards import Step

DTYPES = ("bfloat16", "float16", "float32", "auto")
"""Of scales and floats; the first by default."""
_BYTES_PER_ITEM = 16  # of a block: unpacked, in fp32, packed again
_ABOUT = (
    "Integers are those of the source, code for code; scales and zeros were rounded once, to the "
    "dtype above. Inputs are not quantised."
)


def convert(
    pretrained: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    dtype: str = "bfloat16",
    head: str | None = None,
    memory_limit: int | str | None = None,
    max_shard_size: int | str = "2GB",
    progress: Progress | None = None,
    **kwargs: Any,
) -> Path:
    """Write a checkpoint that streams out of one that others have quantised, code for code.

    GPTQ, AWQ, AutoRound, compressed-tensors and MLX: integers of 4 bits, or of 8 with one scale a
    row. Nothing is rounded but scales, zeros and floats, to `dtype`. Quantised embeddings and heads
    become floats. It goes on where it was when it is run again.

    Args:
        pretrained: a folder or a hub id.
        target: the folder to make; it must not be there.
        dtype: "bfloat16", for which torch has fast kernels; "float16" or "float32", without; "auto"
            is what the checkpoint says.
        head: "int8" rounds the output head to that, also where it has shared the embedding's
            weight; None leaves it.
        memory_limit: what the process may hold, as for `from_pretrained`; None takes what is quick.
        max_shard_size: of a file, "2GB" or bytes.
        progress: called with bytes done and bytes in all.
        **kwargs: `revision`, `subfolder` and the like, for the library's `from_pretrained`.

    Returns:
        The folder.

    Raises:
        OptionError: an option means nothing, the target is there, or the disk is full.
        CheckpointError: the source is malformed or pickled.
        ReadError: the source could not be read.
        UnsupportedModelError: it is quantised in a way that cannot be taken over; names the way.
        MemoryLimitError: the limit is too small; says the smallest that works.
    """
    return make(
        pretrained,
        target,
        dtype=dtype,
        head=head,
        memory_limit=memory_limit,
        max_shard_size=max_shard_size,
        progress=progress,
        **kwargs,
    ).folder


def make(
    pretrained: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    dtype: str,
    head: str | None,
    memory_limit: int | str | None,
    max_shard_size: int | str,
    progress: Progress | None,
    **kwargs: Any,
) -> Made:
    """As `convert`, and raises what that does; says what stayed, or became, floats, too."""
    if dtype not in DTYPES:
        raise OptionError(f"dtype={dtype!r} is unknown. Choose one of {', '.join(DTYPES)}.")
    shard_bytes = parse_size(max_shard_size, name="max_shard_size")
    head_form = make_head_form(head, INT8)
    source = open_coded(pretrained, dtype, kwargs)
    chosen = source.choose()
    config = source.config(chosen, PART_BYTES)
    new_head = None if head_form is None else _take_head(source, head_form, config)
    kernel = Kernel(chosen.bits, chosen.group, config.order or "", chosen.reordered, source.dtype)
    reading = Reading(source.files, _items(memory_limit, source, new_head))
    parts = {name: config.parts(*source.coded[name].shape) for name in chosen.names}
    steps: list[Step] = []
    for one in source.in_order():
        if isinstance(one, TensorEntry):
            of = None if new_head is None or one.name != new_head.source else new_head
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
        without={*chosen.names, *([] if new_head is None else [new_head.name])},
    )
    origin = Origin(pretrained, source.paths)
    request = origin.request() | {
        "quantization_config": config.to_dict(),
        "dtype": str(kernel.dtype),
        "shard_bytes": shard_bytes,
    }
    dtype_name = str(kernel.dtype).removeprefix("torch.")
    # MLX says the same by another key, and some an older name of the dtype.
    changes: dict[str, Any] = {"quantization": None, "torch_dtype": None}
    changes |= {"quantization_config": config.to_dict(), "dtype": dtype_name}
    rows = {"Dtype of scales and floats": dtype_name}
    integers = sum(map(len, parts.values()))
    if new_head is not None:
        rows["Output head"] = new_head.form.description
        integers += new_head.form.parts(new_head.module)
        if new_head.is_tied:
            changes["tie_word_embeddings"] = False
    with Output(Path(target).absolute(), request) as output:
        write_weights(output, divide(steps, shard_bytes), progress)
        making = model_card.Making(
            _Form(source.format.title, config),
            "convert",
            config.modules_to_not_convert,
            rows,
            _ABOUT,
            floats,
            source.total_bytes,
        )
        complete(output, origin, changes, making, integers)
    return Made(Path(target), floats)


def _take_head(source: CodedCheckpoint, form: Form, config: PipeloadConfig) -> Head:
    """The output head, which is to become that form, and is written down as such.

    Raises:
        UnsupportedModelError: there is none that can be, or its integers are there already.
    """
    found = find_head(source.pending, form)
    if found.source in source.coded:
        raise UnsupportedModelError(
            f"the output head, {found.source!r}, is quantised already and becomes floats; integers "
            "of those would be rounded twice. Leave --head out."
        )
    config.modules_to_not_convert.remove(found.path)
    if config.bits != HEAD_BITS:
        config.modules[found.path] = {"bits": HEAD_BITS}
    return found


class _Form:
    """For the card."""

    loaded_by = METHOD

    def __init__(self, title: str, config: PipeloadConfig) -> None:
        self.name, self.order = f"int{config.bits}", config.order
        scales = f"groups of {config.group_size}" if config.group_size else "one scale for each row"
        self.description = f"{self.name}, {scales}, quantised by {title}"


def _items(memory_limit: int | str | None, source: CodedCheckpoint, new_head: Head | None) -> int:
    """How many codes to convert, or numbers to round, at once. Raises what `items_at_once` does."""
    largest = max(source.coded.values(), key=lambda weight: weight.nbytes)
    columns = max(weight.shape[1] for weight in source.coded.values())
    item_bytes = _BYTES_PER_ITEM
    if new_head is not None:
        columns, item_bytes = max(columns, new_head.module.in_features), ROUNDED_BYTES_PER_ITEM
    held = 2 * largest.nbytes  # its tensors, statistics in fp32 among them
    what = f"converting {largest.name!r}"
    return items_at_once(memory_limit, columns, item_bytes, held=held, what=what, of="")
