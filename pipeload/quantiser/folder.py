"""What is in the folder of a quantised checkpoint, and whether the library takes it for one."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import transformers

from pipeload.errors import CheckpointError, UnsupportedModelError
from pipeload.hf.takeover import peek
from pipeload.quantiser import model_card
from pipeload.quantiser.resumable_shards import Output, Step, shard_name

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    from pipeload.quantiser.model_card import Making

Progress = Callable[[int, int], None]
"""Called with the bytes that are done and those of all, again and again."""
Rest = Callable[[Output], None]
"""Writes all but the weights and the card."""

_COPIED = {".json", ".jinja", ".txt", ".model", ".tiktoken", ".py"}
_COPIED_NAMES = ("LICENSE", "NOTICE", "USE_POLICY")
_COPIED_BYTES = 256 << 20
_WEIGHTS_INDEX = "model.safetensors.index.json"
_OWN_CODE = ("trust_remote_code", "code_revision")
"""Options for models whose code is no part of the library: it is copied along."""
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


class Origin(NamedTuple):
    """Of what a checkpoint is made."""

    pretrained: str | os.PathLike[str]
    """As it was named: a folder, a file or a hub id."""
    files: Sequence[Path]
    """Its tensors'."""

    @property
    def from_hub(self) -> bool:
        """Whether it was named by a hub id."""
        return not Path(self.pretrained).exists()

    @property
    def name(self) -> str:
        """The hub id, or only the name of the folder or file."""
        return str(self.pretrained) if self.from_hub else Path(self.pretrained).resolve().name

    def request(self) -> dict[str, Any]:
        """What a run that goes on must find unchanged; JSON."""
        named = self.pretrained if self.from_hub else Path(self.pretrained).absolute()
        stats = ((file.name, file.stat()) for file in self.files)
        files = [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]
        # Another version may round otherwise: a folder is made by one.
        return {"source": str(named), "files": files, "pipeload": metadata.version("pipeload")}


def complete(
    output: Output,
    origin: Origin,
    rest: Rest,
    making: Making,
    count: int,
    *,
    options: Mapping[str, Any],
) -> None:
    """Write all but the weights, see that the library finds these, and give the folder its name.

    Args:
        output: with its weights.
        origin: what it is made of.
        rest: writes configuration, tokenizer and the like.
        making: for the card.
        count: of quantised weights.
        options: what the source was loaded with.

    Raises:
        OptionError: the disk is full, or cannot be written to.
        UnsupportedModelError: the library does not find the weights.
    """
    rest(output)
    nbytes = sum(file.stat().st_size for file in output.folder.glob("*.safetensors"))
    card = model_card.write(
        making,
        source=origin.name,
        from_hub=origin.from_hub,
        name=output.target.name,
        after=nbytes,
    )
    output.write_text("README.md", card)
    own_code = {name: options[name] for name in _OWN_CODE if name in options}
    check_result(output.folder, making.form.loaded_by, count, **own_code)
    output.finish()


def copy_rest(source: Path, changes: Mapping[str, Any], output: Output) -> None:
    """Copy what is beside the weights in a folder; None among `changes` takes a key out."""
    for file in sorted(source.iterdir()):
        wanted = file.suffix in _COPIED or file.name.startswith(_COPIED_NAMES)
        wanted = wanted and not file.name.endswith(".index.json") and file.name != "config.json"
        if wanted and file.is_file() and file.stat().st_size <= _COPIED_BYTES:
            output.copy(file)
    write_config(json.loads((source / "config.json").read_text(encoding="utf-8")), changes, output)


def write_config(told: Mapping[str, Any], changes: Mapping[str, Any], output: Output) -> None:
    """Write config.json; None among `changes` takes a key out."""
    both = {**told, **changes}
    kept = {n: value for n, value in both.items() if value is not None or n not in changes}
    output.write_text("config.json", json.dumps(kept, indent=2) + "\n")


def check_result(folder: Path, loaded_by: str, count: int, **options: Any) -> None:
    """Whether the library finds every quantised weight by the name that it was given.

    `options`: for loading it.

    Raises:
        UnsupportedModelError: it does not.
    """
    auto: Any = transformers.AutoModelForCausalLM
    options |= {"dtype": "auto", "local_files_only": True}
    pending = peek(lambda: auto.from_pretrained(folder, **options))
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
