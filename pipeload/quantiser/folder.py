"""What is in the folder of a quantised checkpoint, and whether the library takes it for one."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import transformers

from pipeload.errors import CheckpointError, UnsupportedModelError
from pipeload.hf.takeover import peek
from pipeload.quantiser.resumable_shards import Output, Step, shard_name

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

Progress = Callable[[int, int], None]
"""Called with the bytes that are done and those of all, again and again."""

_COPIED = {".json", ".jinja", ".txt", ".model", ".tiktoken", ".py"}
_COPIED_NAMES = ("LICENSE", "NOTICE", "USE_POLICY")
_COPIED_BYTES = 256 << 20
_WEIGHTS_INDEX = "model.safetensors.index.json"
_AS_IT_IS = "Delete the folder, and stream the model as it is."


def write_weights(output: Output, shards: list[list[Step]], progress: Progress | None) -> None:
    """Write the shards, and their index.

    Raises:
        OptionError: the disk is full, or cannot be written to.
    """
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


def write_rest(
    output: Output, source: Path, config: dict[str, Any], told: Mapping[str, Any]
) -> None:
    """Copy what else is in the folder `source`; its configuration gets `config` and `told`.

    Raises:
        OptionError: the disk is full, or cannot be written to.
    """
    for file in sorted(source.iterdir()):
        wanted = file.suffix in _COPIED or file.name.startswith(_COPIED_NAMES)
        wanted = wanted and not file.name.endswith(".index.json") and file.name != "config.json"
        if wanted and file.is_file() and file.stat().st_size <= _COPIED_BYTES:
            output.copy(file)
    written: dict[str, Any] = json.loads((source / "config.json").read_text(encoding="utf-8"))
    written["quantization_config"] = config
    written.pop("quantization", None)  # as MLX says the same
    if "dtype" in told:
        written.pop("torch_dtype", None)  # its older name
    written |= told
    output.write_text("config.json", json.dumps(written, indent=2) + "\n")


def check_result(folder: Path, loaded_by: str, count: int) -> None:
    """Whether the library finds every quantised weight by the name that it was given.

    Raises:
        UnsupportedModelError: it does not.
    """
    auto: Any = transformers.AutoModelForCausalLM
    pending = peek(lambda: auto.from_pretrained(folder, dtype="auto", local_files_only=True))
    if pending is None or pending.quantised_by != loaded_by:
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
