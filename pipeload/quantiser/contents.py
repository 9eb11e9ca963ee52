"""What `convert` writes: of any source, what becomes of its weights, and what is said of that."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from pipeload.formats.integers.format import METHOD
from pipeload.quantiser.forms import HEAD_BITS

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from pipeload.formats.integers.quantizer import PipeloadConfig
    from pipeload.quantiser.folder import Origin, Rest
    from pipeload.quantiser.model_card import Floats
    from pipeload.quantiser.options import Head
    from pipeload.quantiser.resumable_shards import Step


class Contents(NamedTuple):
    """Of a converted checkpoint."""

    origin: Origin
    title: str
    """Of the method that made the integers, for people."""
    config: PipeloadConfig
    dtype: torch.dtype
    """Of scales and floats."""
    head: Head | None
    """That becomes integers."""
    steps: list[Step]
    integers: int
    """Weights that are: parts count by themselves."""
    floats: Floats
    source_bytes: int
    about: str
    """For the card."""
    rest: Rest
    rounded: Mapping[str, int] = MappingProxyType({})
    """How many Linears of integers are rounded again, by what those are."""


class ConvertedForm:
    """For the card."""

    loaded_by = METHOD

    def __init__(self, title: str, config: PipeloadConfig) -> None:
        """`title`: of the method that made the integers."""
        self.name, self.order = f"int{config.bits}", config.order
        scales = f"groups of {config.group_size}" if config.group_size else "one scale for each row"
        self.description = f"{self.name}, {scales}, quantised by {title}"


def with_head(config: PipeloadConfig, head: Head) -> None:
    """Write down that the output head is integers."""
    config.modules_to_not_convert.remove(head.path)
    if config.bits != HEAD_BITS:
        config.modules[head.path] = {"bits": HEAD_BITS}


def changed(config: PipeloadConfig, dtype: torch.dtype, head: Head | None) -> dict[str, Any]:
    """What config.json says that the source's did not; None: nothing any more."""
    # MLX says the same by another key, and some an older name of the dtype.
    changes: dict[str, Any] = {"quantization": None, "torch_dtype": None}
    changes |= {"quantization_config": config.to_dict(), "dtype": name_of(dtype)}
    if head is not None and head.is_tied:
        changes["tie_word_embeddings"] = False
    return changes


def name_of(dtype: torch.dtype) -> str:
    """As in config.json."""
    return str(dtype).removeprefix("torch.")
