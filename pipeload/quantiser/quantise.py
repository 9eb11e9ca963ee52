"""Makes a quantised checkpoint of a float one, tensor by tensor."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import transformers

from pipeload._sizes import parse_size
from pipeload.checkpoint.fingerprint import SOURCE_DIGEST
from pipeload.checkpoint.headers import lacking
from pipeload.entry.sources import check_source
from pipeload.errors import CheckpointError, UnsupportedModelError
from pipeload.formats.integers.compensation import BLOCK
from pipeload.hf.takeover import peek
from pipeload.quantiser import calibration, experts, model_card
from pipeload.quantiser.calibration_text import BUILTIN, find_text
from pipeload.quantiser.float_source import FloatSource
from pipeload.quantiser.folder import Origin, complete, copy_rest, write_weights
from pipeload.quantiser.mixed_bits import MixedBits, check_limit, find_gradients, shared_by
from pipeload.quantiser.options import choose, make_form, make_head_form
from pipeload.quantiser.resumable_shards import Output, divide
from pipeload.quantiser.tensor import ROUNDED_BYTES_PER_ITEM, items_at_once

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from pipeload.hf.pending_load import PendingLoad
    from pipeload.quantiser.folder import Progress
    from pipeload.quantiser.model_card import Floats


_PRODUCT_BYTES = 4 * BLOCK * 4  # of a column: with those of its block; factors, and finding them
_MOST_FLOATS = 0.5  # of the weights, before one is told that little was quantised
_READ = "The float model read the text once; nothing was trained."
_log = logging.getLogger("pipeload")


def quantize(
    pretrained: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    method: str = "int8",
    group_size: int | None = None,
    zero_points: str | None = None,
    double_quant: bool = False,
    head: str | None = None,
    calibrate: str | os.PathLike[str] | None = None,
    calibration_tokens: int | None = None,
    gptq: bool = False,
    size: int | str | None = None,
    memory_limit: int | str | None = None,
    max_shard_size: int | str = "2GB",
    progress: Progress | None = None,
    **kwargs: Any,
) -> Path:
    """Write a quantised copy of a float checkpoint. It goes on where it was when it is run again.

    Linear weights become integers, and with int4 and int8 experts, too; embeddings, the output
    head, and what the kernels do not take stay as they are stored.

    Args:
        pretrained: a folder or a hub id.
        target: the folder to make; it must not be there.
        method: "int8", one scale a row; "int4", a scale and a zero point a group; "nf4" or "fp4",
            what bitsandbytes makes with `load_in_4bit`, which is needed for it.
        group_size: of int4: 32, 64 (if None) or 128 neighbours in a row.
        zero_points: of int4, how scales and zeros are found: "search" for the least squared error
            (if None), "rtn" (round to nearest), or "hqq", which moves the zeros of that.
        double_quant: of nf4 and fp4: the scales are quantised, too.
        head: of int4 and int8: "int8" makes the output head int8 as well, also where it has shared
            the embedding's weight; None or "float" leave it.
        calibrate: of int4 and int8: a file with a text, or "builtin", the one that comes with
            pipeload. The float model reads it once, streamed within the limit, and errors count by
            how large their inputs were: much closer, above all for int4. None or "off" look at
            the weights alone.
        calibration_tokens: of that text, 4096 if None.
        gptq: of int4 with a text: columns make up for each other's errors, within blocks of 512;
            somewhat closer, and slower. Products of inputs take 2 KB on disk meanwhile for each
            column of each Linear and each pass of the text.
        size: of int4: "3GB" or bytes for all weights together. Linears get int4 in groups of 32, 64
            or 128, or int8, whichever costs least; how much each matters is told by the gradients
            of the float model on some of the text ("builtin" if `calibrate` is None).
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
        UnsupportedModelError: there is nothing that could be quantised.
        MemoryLimitError: the limit is too small; says the smallest that works.
    """
    return make(
        pretrained,
        target,
        method=method,
        group_size=group_size,
        zero_points=zero_points,
        double_quant=double_quant,
        head=head,
        calibrate=calibrate,
        calibration_tokens=calibration_tokens,
        gptq=gptq,
        size=size,
        memory_limit=memory_limit,
        max_shard_size=max_shard_size,
        progress=progress,
        **kwargs,
    ).folder


class Made(NamedTuple):
    """What became of a checkpoint."""

    folder: Path
    floats: Floats
    rounded: Mapping[str, int] = MappingProxyType({})
    """How many Linears of integers had to be rounded again, by what those were."""


def make(
    pretrained: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    method: str,
    group_size: int | None,
    zero_points: str | None,
    double_quant: bool,
    head: str | None,
    calibrate: str | os.PathLike[str] | None,
    calibration_tokens: int | None,
    gptq: bool,
    size: int | str | None,
    memory_limit: int | str | None,
    max_shard_size: int | str,
    progress: Progress | None,
    calibrating: Progress | None = None,
    going_back: Progress | None = None,
    **kwargs: Any,
) -> Made:
    """As `quantize`, and raises what that does; says what stayed floats, too.

    `calibrating` is called with Linears that have run, and all that will; `going_back`, for a size,
    with blocks that gradients have gone back through, and all.
    """
    if size is not None and calibrate is None:
        calibrate = BUILTIN
    text = find_text(calibrate, calibration_tokens)
    form = make_form(
        method,
        group_size=group_size,
        zero_points=zero_points,
        double_quant=double_quant,
        calibrate=None if text is None else str(calibrate),
        gptq=gptq,
        mixed=size is not None,
    )
    shard_bytes = parse_size(max_shard_size, name="max_shard_size")
    head_form = make_head_form(head, method)
    pending = _open(pretrained, kwargs)
    choice = choose(pending, form, head_form)
    packed = choice.experts
    config = form.config(
        pending.model,
        choice.kept,
        None if choice.head is None else choice.head.path,
        packed[0].shape.dtype if packed else None,
    )
    source = FloatSource(pending, form, choice)
    mixed = None if size is None else MixedBits(size, shared_by(pending, choice), gptq=gptq)
    _items(memory_limit, source, gptq)  # refuses before anything is made
    if mixed is not None and memory_limit is not None:
        check_limit(pretrained, mixed.shared, memory_limit, **kwargs)
    floats = source.floats()
    origin = Origin(pretrained, pending.files)
    request = origin.request() | {
        "quantization_config": config,
        "shard_bytes": shard_bytes,
        "calibration": None if text is None else text.request(),
    }
    if mixed is not None:
        request["size"] = mixed.size
    with Output(Path(target).absolute(), request) as output:
        known = calibration.Importances({}, "")
        if text is not None:
            known = calibration.collect(
                pretrained,
                text,
                calibration.Sums(output, request, source.columns(), packed, products=gptq),
                memory_limit="auto" if memory_limit is None else memory_limit,
                advance=calibrating,
                **kwargs,
            )
        rows = {"Calibration": known.read} if known.read else {}
        reading = source.reading(_items(memory_limit, source, gptq))
        if mixed is not None and text is not None:
            gradients = partial(
                find_gradients,
                pretrained,
                text,
                mixed.shared,
                output,
                memory_limit="auto" if memory_limit is None else memory_limit,
                advance=going_back,
                **kwargs,
            )
            forms = mixed.choose(output, known.mean_squares, gradients, reading)
            config["modules"] |= source.take(forms)
            rows["Bits"] = mixed.describe(forms)
        steps = source.steps(reading, known)
        write_weights(output, divide(steps, shard_bytes), progress)
        if packed:
            rows["Experts"] = experts.described(packed, known.few_rows)
        changes: dict[str, Any] = {"quantization_config": config}
        changes[SOURCE_DIGEST] = source.digest()  # `draft="auto"` finds it by that
        if choice.head is not None:
            rows["Output head"] = choice.head.form.description
            if choice.head.is_tied:
                changes["tie_word_embeddings"] = False
        making = model_card.Making(
            form,
            "quantize",
            choice.kept,
            rows,
            ("Embeddings are" if choice.head else "Embeddings and the output head are")
            + " kept as floats. "
            + (_READ if known.read else "No data was used."),
            floats,
            pending.checkpoint.total_bytes,
        )
        rest = partial(copy_rest, origin.files[0].parent, changes)
        complete(output, origin, rest, making, source.parts, options=kwargs)
    if floats.share > _MOST_FLOATS:
        _log.warning("%s of %s stayed floats", floats.described(), pretrained)
    return Made(Path(target), floats)


def _open(pretrained: str | os.PathLike[str], kwargs: dict[str, Any]) -> PendingLoad:
    auto: Any = transformers.AutoModelForCausalLM
    passed_on = check_source(pretrained, {"dtype": "auto", **kwargs})
    pending = peek(lambda: auto.from_pretrained(pretrained, **passed_on))
    if pending is None:
        raise CheckpointError(f"{str(pretrained)!r} holds no weights. Name a folder that does.")
    if pending.quantised_by is not None:
        raise UnsupportedModelError(
            f"{str(pretrained)!r} is quantised already, by {pending.quantised_by!r}. Quantise the "
            "model's float checkpoint."
        )
    if missing := pending.missing():
        raise lacking(str(pretrained), sorted(missing))
    return pending


def _items(memory_limit: int | str | None, source: FloatSource, products: bool) -> int:
    """How many weights to quantise at once. Raises what `items_at_once` does.

    `products`: whether those of inputs are there meanwhile.
    """
    linears = [module for module, _ in source.linears.values()]
    packed = source.choice.experts
    columns = [linear.in_features for linear in linears]
    columns += [max(one.shape.hidden, one.shape.inner) for one in packed]
    beside = _PRODUCT_BYTES if products else 0
    held = [one.weight.numel() // 8 + one.in_features * beside for one in linears]
    held += [one.held_bytes for one in packed]
    of = f" for rows of {max(columns)} weights"
    return items_at_once(
        memory_limit, max(columns), ROUNDED_BYTES_PER_ITEM, held=max(held), what="quantising", of=of
    )
