"""What becomes of a GGUF file: a checkpoint of its integers, with configuration and tokenizer."""

from __future__ import annotations

import json
import logging
import math
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import transformers

from pipeload.entry.sources import check_source
from pipeload.entry.texts import load_tokenizer
from pipeload.errors import CheckpointError
from pipeload.hf.gguf import end_tokens
from pipeload.hf.takeover import peek
from pipeload.quantiser import model_card
from pipeload.quantiser.contents import Contents, changed, with_head
from pipeload.quantiser.folder import Origin, write_config
from pipeload.quantiser.gguf_tensor import GgufTensors
from pipeload.quantiser.options import find_head
from pipeload.quantiser.tensor import ROUNDED_BYTES_PER_ITEM, Reading, items_at_once

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from pipeload.hf.pending_load import PendingLoad
    from pipeload.quantiser.forms import IntegerForm
    from pipeload.quantiser.resumable_shards import Output, Step

_log = logging.getLogger("pipeload")


def gguf_contents(
    pretrained: str | os.PathLike[str],
    dtype: str,
    head_form: IntegerForm | None,
    memory_limit: int | str | None,
    kwargs: dict[str, Any],
) -> Contents:
    """Find all that is to be written of a GGUF file. Raises what `convert` does."""
    pending = _open(pretrained, dtype, kwargs)
    source = GgufTensors(pending)
    config = source.config()
    head = None if head_form is None else find_head(source.as_floats, head_form)
    rows = [linear.in_features for linear in source.linears.values()]
    if head is not None:
        with_head(config, head)
        rows.append(head.module.in_features)
    what = f"converting rows of {max(rows)} weights"
    items = items_at_once(memory_limit, max(rows), ROUNDED_BYTES_PER_ITEM, held=0, what=what, of="")
    reading = Reading(source.files, items)
    steps: list[Step] = []
    for entry in source.entries:
        of = None if head is None or entry.name != head.source else head
        if of is not None:
            steps.append(source.integers(entry, of.name, config, reading))
        if entry.name in source.linears:
            steps.append(source.integers(entry, entry.name, config, reading))
        elif of is None or of.is_tied:
            steps.append(source.floats(entry, reading))
    made = {*source.linears, *([] if head is None else [head.name])}
    counts = {entry.name: math.prod(entry.shape) for entry in source.entries}
    file = pending.files[0] if Path(pretrained).is_dir() else pretrained
    changes = changed(config, source.dtype, head)
    return Contents(
        origin=Origin(file, pending.files),
        title="llama.cpp (GGUF)",
        config=config,
        dtype=source.dtype,
        head=head,
        steps=steps,
        integers=sum(source.parts(name, config) for name in source.linears),
        floats=model_card.Floats(counts, without=made),
        source_bytes=sum(entry.nbytes for entry in source.entries),
        about=source.about(),
        rest=partial(_write_rest, pending, str(pretrained), kwargs, changes),
        rounded=source.rounded,
    )


def _open(pretrained: str | os.PathLike[str], dtype: str, kwargs: dict[str, Any]) -> PendingLoad:
    auto: Any = transformers.AutoModelForCausalLM
    # What the library makes of such files where nobody says is fp32.
    named = {"dtype": "float32" if dtype == "auto" else dtype, **kwargs}
    passed_on = check_source(pretrained, named)
    pending = peek(lambda: auto.from_pretrained(pretrained, **passed_on))
    assert pending is not None  # noqa: S101 - such a load has weights, or raises
    return pending


def _write_rest(
    pending: PendingLoad,
    pretrained: str,
    kwargs: Mapping[str, Any],
    changes: Mapping[str, Any],
    output: Output,
) -> None:
    """Write what the library makes of the file's metadata; end tokens that it loses, as well.

    Raises:
        OptionError: the disk is full, or cannot be written to.
    """
    model: Any = pending.model
    told = json.loads(model.config.to_json_string(use_diff=True))
    write_config(told | {"architectures": [type(model).__name__]}, changes, output)
    if model.generation_config is not None:
        said = json.loads(model.generation_config.to_json_string())
        ends, known = end_tokens(pending.files[0], model), said.get("eos_token_id")
        if ends and ends not in (known, [known]):
            said["eos_token_id"] = ends
            said.pop("_from_model_config", None)  # else it is made anew, of config.json
        output.write_text("generation_config.json", json.dumps(said, indent=2) + "\n")
    try:
        tokenizer = load_tokenizer(pretrained, **kwargs)
    except CheckpointError as error:
        _log.warning("the folder gets no tokenizer: %s", error)
        return
    output.save(tokenizer.save_pretrained)
