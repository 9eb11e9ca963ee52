"""Takes over the integers of a checkpoint that others have quantised, code for code."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeload._sizes import format_size, parse_size
from pipeload.checkpoint.headers import TensorEntry
from pipeload.errors import MemoryLimitError, OptionError
from pipeload.formats.integers.format import METHOD
from pipeload.formats.integers.order import BLOCK_ROWS, kernel_order
from pipeload.formats.integers.quantizer import PipeloadConfig
from pipeload.quantiser import model_card
from pipeload.quantiser.coded_source import CodedSource
from pipeload.quantiser.coded_tensor import Kernel, as_floats, as_integers, cast
from pipeload.quantiser.folder import check_result, write_rest, write_weights
from pipeload.quantiser.forms import PART_BYTES
from pipeload.quantiser.quantise import Made
from pipeload.quantiser.resumable_shards import Output, divide
from pipeload.quantiser.tensor import Reading
from pipeload.system.memory import parse_limit, rss_bytes
from pipeload.weights.read_tensor import PIECE_BYTES

if TYPE_CHECKING:
    import os

    from pipeload.quantiser.folder import Progress
    from pipeload.quantiser.resumable_shards import Step

DTYPES = ("bfloat16", "float16", "float32", "auto")
"""Of scales and floats; the first by default."""
_MOST_ITEMS = 4 << 20  # codes at once
_BYTES_PER_ITEM = 16  # of a block: unpacked, in fp32, packed again
_SPARE_BYTES = 32 << 20
_ABOUT = (
    "Integers are those of the source, code for code; scales and zeros were rounded once, to the "
    "dtype above. Inputs are not quantised."
)


def convert(
    pretrained: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    dtype: str = "bfloat16",
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
    memory_limit: int | str | None,
    max_shard_size: int | str,
    progress: Progress | None,
    **kwargs: Any,
) -> Made:
    """As `convert`, and raises what that does; says what stayed, or became, floats, too."""
    if dtype not in DTYPES:
        raise OptionError(f"dtype={dtype!r} is unknown. Choose one of {', '.join(DTYPES)}.")
    shard_bytes = parse_size(max_shard_size, name="max_shard_size")
    source = CodedSource(pretrained, dtype, kwargs)
    chosen = source.choose()
    four = chosen.bits == 4
    config = PipeloadConfig(
        chosen.bits,
        group_size=chosen.group if four else None,
        method=source.format.method,
        order=kernel_order() if four else None,
        reordered=chosen.reordered,
        part_bytes=PART_BYTES,
        modules_to_not_convert=chosen.kept,
    )
    kernel = Kernel(chosen.bits, chosen.group, config.order or "", chosen.reordered, source.dtype)
    reading = Reading(source.files, _items(memory_limit, source))
    parts = {name: config.parts(*source.coded[name].shape) for name in chosen.names}
    steps: list[Step] = []
    for one in source.in_order():
        if isinstance(one, TensorEntry):
            steps.append(cast(one, source.files, kernel.dtype))
        elif one.name in parts:
            steps.append(as_integers(one, kernel, parts[one.name], reading))
        else:
            steps.append(as_floats(one, reading, kernel.dtype))
    floats = model_card.Floats(
        {entry.name: math.prod(entry.shape) for entry in source.plain}
        | {name: math.prod(weight.shape) for name, weight in source.coded.items()},
        without=chosen.names,
    )
    folder = Path(pretrained)
    request = {
        "source": str(folder.absolute() if folder.is_dir() else pretrained),
        "files": [[f.name, f.stat().st_size, f.stat().st_mtime_ns] for f in source.paths],
        "quantization_config": config.to_dict(),
        "dtype": str(kernel.dtype),
        "shard_bytes": shard_bytes,
    }
    with Output(Path(target).absolute(), request) as output:
        write_weights(output, divide(steps, shard_bytes), progress)
        dtype_name = str(kernel.dtype).removeprefix("torch.")
        write_rest(output, source.paths[0].parent, config.to_dict(), {"dtype": dtype_name})
        card = model_card.write(
            source=folder.resolve().name if folder.is_dir() else str(pretrained),
            from_hub=not folder.is_dir(),
            name=output.target.name,
            form=_Form(source.format.title, config),
            command="convert",
            kept_paths=chosen.kept,
            rows={"Dtype of scales and floats": dtype_name},
            about=_ABOUT,
            floats=floats,
            before=source.total_bytes,
            after=sum(file.stat().st_size for file in output.folder.glob("*.safetensors")),
        )
        output.write_text("README.md", card)
        check_result(output.folder, METHOD, sum(map(len, parts.values())))
        output.finish()
    return Made(Path(target), floats)


class _Form:
    """For the card."""

    loaded_by = METHOD

    def __init__(self, title: str, config: PipeloadConfig) -> None:
        self.name, self.order = f"int{config.bits}", config.order
        scales = f"groups of {config.group_size}" if config.group_size else "one scale for each row"
        self.description = f"{self.name}, {scales}, quantised by {title}"


def _items(memory_limit: int | str | None, source: CodedSource) -> int:
    """How many codes to convert at once.

    Raises:
        MemoryLimitError: the limit is too small for the largest weight.
    """
    if memory_limit is None:
        return _MOST_ITEMS
    limit, held = parse_limit(memory_limit), rss_bytes() + _SPARE_BYTES + PIECE_BYTES
    largest = max(source.coded.values(), key=lambda weight: weight.nbytes)
    # Its tensors, statistics in fp32 among them, and columns of one block.
    held += 2 * largest.nbytes
    columns = max(weight.shape[1] for weight in source.coded.values())
    least = held + BLOCK_ROWS * columns * _BYTES_PER_ITEM
    if limit < least:
        raise MemoryLimitError(
            f"converting {largest.name!r} needs {format_size(least)}, over the limit of {limit} "
            f"bytes. Set at least {least} bytes.",
            limit=limit,
            smallest_limit=least,
        )
    return min(_MOST_ITEMS, (limit - held) // _BYTES_PER_ITEM)
