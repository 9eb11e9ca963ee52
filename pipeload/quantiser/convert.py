"""Takes over the integers of a checkpoint that others have quantised, code for code."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeload._sizes import parse_size
from pipeload.entry.sources import source_of
from pipeload.errors import OptionError
from pipeload.formats.form_names import INT8
from pipeload.quantiser import model_card
from pipeload.quantiser.coded_contents import coded_contents
from pipeload.quantiser.contents import ConvertedForm, name_of
from pipeload.quantiser.folder import complete, write_weights
from pipeload.quantiser.gguf_contents import gguf_contents
from pipeload.quantiser.options import make_head_form
from pipeload.quantiser.quantise import Made
from pipeload.quantiser.resumable_shards import Output, divide

if TYPE_CHECKING:
    import os

    from pipeload.quantiser.folder import Progress

DTYPES = ("bfloat16", "float16", "float32", "auto")
"""Of scales and floats; the first by default."""


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

    GPTQ, AWQ, AutoRound, compressed-tensors, MLX, HQQ, torchao and Quark: integers of up to 4 bits,
    or of 8 with one scale a row, symmetric. Nothing is rounded but scales, zeros and floats, to
    `dtype`. Quantised embeddings and heads become floats. Of a GGUF file, Linears of Q4_0, Q4_1 and
    Q4_K are taken over so; those of other types, for which there is no kernel, are rounded again,
    to int8 with one scale a row. It goes on where it was when it is run again.

    Args:
        pretrained: a folder, a hub id, or a GGUF file (of a hub id, `gguf_file=` names it).
        target: the folder to make; it must not be there.
        dtype: "bfloat16", for which torch has fast kernels; "float16" or "float32", without; "auto"
            is what the checkpoint says, and float32 of a GGUF file.
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
    folder, named = source_of(str(pretrained))
    kwargs |= named
    find = gguf_contents if kwargs.get("gguf_file") is not None else coded_contents
    found = find(folder, dtype, head_form, memory_limit, kwargs)
    request = found.origin.request() | {
        "quantization_config": found.config.to_dict(),
        "dtype": str(found.dtype),
        "shard_bytes": shard_bytes,
    }
    rows = {"Dtype of scales and floats": name_of(found.dtype)}
    integers = found.integers
    if found.head is not None:
        rows["Output head"] = found.head.form.description
        integers += found.head.form.parts(found.head.module)
    with Output(Path(target).absolute(), request) as output:
        write_weights(output, divide(found.steps, shard_bytes), progress)
        making = model_card.Making(
            ConvertedForm(found.title, found.config),
            "convert",
            found.config.modules_to_not_convert,
            rows,
            found.about,
            found.floats,
            found.source_bytes,
        )
        complete(output, found.origin, found.rest, making, integers, options=kwargs)
    return Made(Path(target), found.floats, found.rounded)
