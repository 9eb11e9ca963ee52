"""Makes a quantised checkpoint of a float one, tensor by tensor."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import transformers

from pipeload._sizes import format_size, parse_size
from pipeload.checkpoint.file_reads import FileSet
from pipeload.checkpoint.headers import lacking, stamps_of
from pipeload.checkpoint.hung_reads import resolve_timeout
from pipeload.entry.loading import check_source
from pipeload.errors import (
    CheckpointError,
    MemoryLimitError,
    UnsupportedModelError,
)
from pipeload.formats.integers.order import BLOCK_ROWS
from pipeload.hf.takeover import peek
from pipeload.quantiser import calibration, model_card
from pipeload.quantiser.calibration_text import find_text
from pipeload.quantiser.options import choose, make_form
from pipeload.quantiser.resumable_shards import Output, Step, divide, shard_name
from pipeload.quantiser.tensor import Reading, copied
from pipeload.system.memory import parse_limit, rss_bytes
from pipeload.weights.read_tensor import PIECE_BYTES

if TYPE_CHECKING:
    import os

    from torch import nn

    from pipeload.hf.pending_load import PendingLoad
    from pipeload.quantiser.forms import Form
    from pipeload.quantiser.model_card import Floats


Progress = Callable[[int, int], None]
"""Called with the bytes that are done and those of all, again and again."""

_MOST_ITEMS = 4 << 20  # quantised at once
_BYTES_PER_ITEM = 40  # what quantising holds, fp32 temporaries and all
_SPARE_BYTES = 32 << 20
_COPIED = {".json", ".jinja", ".txt", ".model", ".tiktoken", ".py"}
_COPIED_NAMES = ("LICENSE", "NOTICE", "USE_POLICY")
_COPIED_BYTES = 256 << 20
_WEIGHTS_INDEX = "model.safetensors.index.json"
_MOST_FLOATS = 0.5  # of the weights, before one is told that little was quantised
_log = logging.getLogger("pipeload")
_AS_IT_IS = "Delete the folder, and stream the model as it is."


def quantize(
    pretrained: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    method: str = "int8",
    group_size: int | None = None,
    zero_points: str | None = None,
    double_quant: bool = False,
    calibrate: str | os.PathLike[str] | None = None,
    calibration_tokens: int | None = None,
    memory_limit: int | str | None = None,
    max_shard_size: int | str = "2GB",
    progress: Progress | None = None,
    **kwargs: Any,
) -> Path:
    """Write a quantised copy of a float checkpoint. It goes on where it was when it is run again.

    Linear weights become integers; embeddings, the output head, and what the kernels do not take
    stay as they are stored.

    Args:
        pretrained: a folder or a hub id.
        target: the folder to make; it must not be there.
        method: "int8", one scale a row; "int4", a scale and a zero point a group; "nf4" or "fp4",
            what bitsandbytes makes with `load_in_4bit`, which is needed for it.
        group_size: of int4: 32, 64 (if None) or 128 neighbours in a row.
        zero_points: of int4, how scales and zeros are found: "search" for the least squared error
            (if None), "rtn" (round to nearest), or "hqq", which moves the zeros of that.
        double_quant: of nf4 and fp4: the scales are quantised, too.
        calibrate: of int4 and int8: a file with a text, or "builtin", the one that comes with
            pipeload. The float model reads it once, streamed within the limit, and errors count by
            how large their inputs were: much closer, above all for int4. None or "off" look at
            the weights alone.
        calibration_tokens: of that text, 4096 if None.
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
        calibrate=calibrate,
        calibration_tokens=calibration_tokens,
        memory_limit=memory_limit,
        max_shard_size=max_shard_size,
        progress=progress,
        **kwargs,
    ).folder


class Made(NamedTuple):
    """What became of a checkpoint."""

    folder: Path
    floats: Floats


def make(
    pretrained: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    method: str,
    group_size: int | None,
    zero_points: str | None,
    double_quant: bool,
    calibrate: str | os.PathLike[str] | None,
    calibration_tokens: int | None,
    memory_limit: int | str | None,
    max_shard_size: int | str,
    progress: Progress | None,
    calibrating: Progress | None = None,
    **kwargs: Any,
) -> Made:
    """As `quantize`, and raises what that does; says what stayed floats, too.

    `calibrating` is called with Linears that have run, and all that will.
    """
    text = find_text(calibrate, calibration_tokens)
    form = make_form(
        method,
        group_size=group_size,
        zero_points=zero_points,
        double_quant=double_quant,
        calibrate=None if text is None else str(calibrate),
    )
    shard_bytes = parse_size(max_shard_size, name="max_shard_size")
    pending = _open(pretrained, kwargs)
    choice = choose(pending, form)
    chosen = choice.linears
    config = form.config(pending.model, choice.kept)
    entries = sorted(pending.checkpoint.entries.values(), key=lambda e: (str(e.file), e.start))
    files = FileSet(pending.files, "buffered", resolve_timeout("auto"), stamps_of(entries))
    _items(memory_limit, chosen)  # refuses before anything is made
    floats = model_card.Floats(
        {entry.name: math.prod(entry.shape) for entry in entries}, without=chosen
    )
    source = Path(pretrained)
    request = {
        "source": str(source.absolute() if source.is_dir() else pretrained),
        "files": [[f.name, f.stat().st_size, f.stat().st_mtime_ns] for f in pending.files],
        "quantization_config": config,
        "shard_bytes": shard_bytes,
        "calibration": None if text is None else text.request(),
    }
    with Output(Path(target).absolute(), request) as output:
        known = calibration.Importances({}, "")
        if text is not None:
            columns = {choice.paths[name]: linear.in_features for name, linear in chosen.items()}
            known = calibration.collect(
                pretrained,
                text,
                calibration.Sums(output, request, columns),
                memory_limit="auto" if memory_limit is None else memory_limit,
                advance=calibrating,
                **kwargs,
            )
        reading = Reading(files, _items(memory_limit, chosen))
        steps = [
            form.step(
                entry, chosen[entry.name], reading, known.mean_squares.get(choice.paths[entry.name])
            )
            if entry.name in chosen
            else copied(entry, files)
            for entry in entries
        ]
        _write(output, divide(steps, shard_bytes), progress)
        _write_rest(output, pending, config)
        card = model_card.write(
            source=source.resolve().name if source.is_dir() else str(pretrained),
            from_hub=not source.is_dir(),
            name=output.target.name,
            form=form,
            kept_paths=choice.kept,
            read=known.read,
            floats=floats,
            before=pending.checkpoint.total_bytes,
            after=sum(file.stat().st_size for file in output.folder.glob("*.safetensors")),
        )
        output.write_text("README.md", card)
        _check_result(output.folder, form, sum(map(form.parts, chosen.values())))
        output.finish()
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


def _items(memory_limit: int | str | None, chosen: dict[str, nn.Linear]) -> int:
    """How many weights to quantise at once."""
    if memory_limit is None:
        return _MOST_ITEMS
    limit, held = parse_limit(memory_limit), rss_bytes() + _SPARE_BYTES + PIECE_BYTES
    most = max(linear.in_features for linear in chosen.values())
    held += max(linear.weight.numel() for linear in chosen.values()) // 8  # statistics of a weight
    least = held + BLOCK_ROWS * most * _BYTES_PER_ITEM
    if limit < least:
        raise MemoryLimitError(
            f"quantising needs {format_size(least)} for rows of {most} weights, over the limit of "
            f"{limit} bytes. Set at least {least} bytes.",
            limit=limit,
            smallest_limit=least,
        )
    return min(_MOST_ITEMS, (limit - held) // _BYTES_PER_ITEM)


# -- the folder ------------------------------------------------------------------------------------


def _write(output: Output, shards: list[list[Step]], progress: Progress | None) -> None:
    total = sum(step.nbytes for shard in shards for step in shard)
    done = 0

    def add(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress is not None:
            progress(done, total)

    homes: dict[str, str] = {}
    for index, names in enumerate(output.write_shards(shards, add)):
        homes.update(dict.fromkeys(names, shard_name(index, len(shards))))
    if len(shards) > 1:
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": homes}, indent=1)
        output.write_text(_WEIGHTS_INDEX, text)


def _write_rest(output: Output, pending: PendingLoad, config: dict[str, Any]) -> None:
    folder = pending.files[0].parent
    for file in sorted(folder.iterdir()):
        wanted = file.suffix in _COPIED or file.name.startswith(_COPIED_NAMES)
        wanted = wanted and not file.name.endswith(".index.json") and file.name != "config.json"
        if wanted and file.is_file() and file.stat().st_size <= _COPIED_BYTES:
            output.copy(file)
    written: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    written["quantization_config"] = config
    output.write_text("config.json", json.dumps(written, indent=2) + "\n")


def _check_result(folder: Path, form: Form, count: int) -> None:
    """Whether the library finds every quantised weight by the name that it was given.

    Raises:
        UnsupportedModelError: it does not.
    """
    auto: Any = transformers.AutoModelForCausalLM
    pending = peek(lambda: auto.from_pretrained(folder, dtype="auto", local_files_only=True))
    if pending is None or pending.quantised_by != form.loaded_by:
        raise UnsupportedModelError(
            f"the library does not take {str(folder)!r} for quantised. {_AS_IT_IS}"
        )
    name = type(pending.model).__name__
    try:
        found = sum(weight.guarded for weight in pending.weights().values())
    except CheckpointError as error:
        raise UnsupportedModelError(
            f"the library does not find again what was made of {name}: {error} {_AS_IT_IS}"
        ) from error
    if found != count:
        raise UnsupportedModelError(
            f"of {count} weights of {name} that were quantised, the library finds {found}. "
            f"{_AS_IT_IS}"
        )
