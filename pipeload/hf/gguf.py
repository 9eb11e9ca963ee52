"""Private parts of transformers: what a GGUF file is to it, and what it leaves out.

Names, configuration and tokenizer stay the library's; of its tensors only what it does to their
values is asked, on numbers of rows. Seen in 5.24.0, tried on 5.17.0 as well.
"""

from __future__ import annotations

import importlib.util
import logging
import re
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from transformers import modeling_gguf_pytorch_utils
from transformers.core_model_loading import Concatenate, WeightConverter

from pipeload.checkpoint.gguf import open_gguf
from pipeload.checkpoint.headers import Checkpoint
from pipeload.errors import CheckpointError, OptionError, UnsupportedModelError
from pipeload.formats.form_names import INT4
from pipeload.formats.gguf.format import Change, Gguf
from pipeload.hf.gguf_reader import light_reader, names_once

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from transformers import PreTrainedModel

    from pipeload.checkpoint.gguf import GgufCheckpoint
    from pipeload.checkpoint.headers import TensorEntry

_log = logging.getLogger("pipeload")
library: Any = modeling_gguf_pytorch_utils
_HEAD: Final = "output.weight"
_ELSEWHERE: Final = (
    "Use the model's safetensors checkpoint, or a smaller copy of that: `pipeload quantize SRC DST "
    f"--method {INT4}`."
)
_MIXTURES: Final = ("llama", "qwen2moe", "qwen3moe")
_ONE_BY_ONE: Final = re.compile(r"^blk\.0\.ffn_gate\.\d+\.weight$")
"""Experts as they were stored before April 2024."""
_STREAMED: Final = (
    *("falcon", "gemma2", "gemma3", "llama", "nemotron", "phi3", "qwen2", "qwen3"),
    *("stablelm", "starcoder2", *_MIXTURES[1:]),
)
"""Those of which it is known what transformers changes of them, each of them tried."""
SIZES_OF_EXPERTS: Final = {
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
"""Without which a model has those of one checkpoint of its kind."""
OF_MIXTRAL: Final = {
    "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
}
_JOINED: Final = "gate_up_proj"
_EXPERTS: Final = re.compile(r"\.ffn_(gate|up)_exps\.weight$")
_ENDS: Final = ("eos", "eot", "eom")
"""Of a text, a turn of a chat, and a message in it."""
# Numbers that only scale the places of tokens, by the words in their names.
_SCALING: Final = ("rope_freqs", "rope_factors_long", "rope_factors_short")


@dataclass(frozen=True, slots=True)
class Translated:
    """A GGUF file's tensors under the model's names, in place of the library's state dict."""

    checkpoint: Checkpoint
    format: Gguf


def check_gguf(folder: str | os.PathLike[str], gguf_file: str) -> None:
    """Refuse a local file that cannot be streamed, before anything is loaded.

    Raises:
        OptionError: the package gguf is missing.
        CheckpointError: the file is not there, or malformed.
        UnsupportedModelError: transformers changes what is in it, or does not know it.
        ReadError: the system could not read it.
    """
    if importlib.util.find_spec("gguf") is None:
        raise OptionError(
            "gguf_file= needs the package gguf, which is not installed: "
            "pip install 'pipeload[gguf]'"
        )
    path = Path(folder, gguf_file)
    if Path(folder).is_dir():
        _check_model(path, open_gguf(path))


def gguf_file_of(config: Any) -> dict[str, str]:
    """The option that names the file that a model was loaded from; none if it was no GGUF file."""
    quantised = getattr(config, "quantization_config", None)
    name = getattr(quantised, "gguf_file", None)
    return {"gguf_file": name} if isinstance(name, str) else {}


def whole_config(path: str, parsed: dict[str, Any]) -> dict[str, Any]:
    """Correct what the library concludes from the first of several files, or does not ask."""
    opened = open_gguf(Path(path))
    for theirs, ours in SIZES_OF_EXPERTS.items():
        size = opened.metadata.get(f"{opened.architecture}.{theirs}")
        if opened.architecture in _MIXTURES and isinstance(size, int):
            parsed["config"][ours] = size
    if _is_mixtral(opened):
        # To the library it is a dense LLaMA, whose MLPs the file lacks: it would make them up.
        told = {ours: opened.metadata[f"llama.{key}"] for key, ours in OF_MIXTRAL.items()}
        parsed["config"] |= {"model_type": "mixtral", **told}
    if len(opened.checkpoint.files) > 1 and _HEAD in opened.checkpoint.entries:
        parsed["config"]["tie_word_embeddings"] = False
    return parsed


def translate(path: str, model: PreTrainedModel) -> Translated:
    """Find the model's names of a file's tensors, and the order of their rows.

    Raises:
        CheckpointError: a file is missing or malformed.
        UnsupportedModelError: the library changes values, or does not know the model.
    """
    opened = open_gguf(Path(path))
    _check_model(Path(path), opened)
    with light_reader():
        parsed = library.load_gguf_checkpoint(path, return_tensors=False)
    kind = library.TENSOR_PROCESSORS.get(opened.architecture, library.TensorProcessor)
    processor = kind(config=parsed.get("config", {}))
    naming, named = processor, {}
    if _is_mixtral(opened):
        naming, named = library.Qwen2MoeTensorProcessor(), {"model_type": "llama"}
    try:
        with names_once():
            names = library.get_gguf_hf_weights_map(model, naming, **named)
    except NotImplementedError as error:
        raise _unsupported(Path(path), opened.architecture, str(error)) from error
    entries: dict[str, TensorEntry] = {}
    changes: dict[str, Change] = {}
    for theirs, entry in opened.checkpoint.entries.items():
        if (name := _name(names, theirs)) is None:
            continue
        change, shape = _change(processor, theirs, entry)
        entries[name] = replace(entry, name=name, shape=shape)
        if change != Change():
            changes[name] = change
    _warn(opened, model)
    checkpoint = Checkpoint(opened.checkpoint.files, MappingProxyType(entries))
    joined = any(name.endswith("_exps") for name in entries)
    return Translated(checkpoint, Gguf(changes, [_joining()] if joined else []))


def _is_mixtral(opened: GgufCheckpoint) -> bool:
    return opened.architecture == "llama" and _says_how_many(opened)


def _says_how_many(opened: GgufCheckpoint) -> bool:
    """Whether it has experts, and says how many of them each token is sent to."""
    said = (opened.metadata.get(f"{opened.architecture}.{key}") for key in OF_MIXTRAL)
    return all(isinstance(count, int) and count > 0 for count in said)


def _joining() -> WeightConverter:
    stacks = [f"experts.{which}_exps" for which in ("gate", "up")]
    return WeightConverter(stacks, f"experts.{_JOINED}", operations=[Concatenate(dim=1)])


def _name(names: Mapping[str, str], theirs: str) -> str | None:
    """Find the model's name of a tensor; None if it has none.

    Experts have none that ends as theirs, and two stacks of them become one.
    """
    if (name := names.get(theirs)) is not None or not theirs.endswith("_exps.weight"):
        return name
    name = names.get(theirs.removesuffix(".weight"))
    if name is None or (found := _EXPERTS.search(theirs)) is None:
        return name
    return name.removesuffix(_JOINED) + f"{found[1]}_exps"


def _check_model(path: Path, opened: GgufCheckpoint) -> None:
    """Refuse what transformers does not know, or changes in another way than by rows."""
    architecture = opened.architecture
    kind = library.TENSOR_PROCESSORS.get(architecture, library.TensorProcessor)
    mixture = opened.metadata.get(f"{architecture}.expert_count")
    if mixture and (architecture not in _MIXTURES or not _says_how_many(opened)):
        why = "it is a mixture of experts, which transformers makes something else of, or nothing"
    elif mixture and any(map(_ONE_BY_ONE.match, opened.checkpoint.entries)):
        why = "its experts are stored one by one, as in files from before April 2024"
    elif architecture in _STREAMED and kind.process in _KNOWN:
        return
    elif kind.process not in _KNOWN:
        why = "transformers changes its values as it loads them"
    elif architecture in library.GGUF_SUPPORTED_ARCHITECTURES:
        why = "nobody has tried that"
    else:
        why = "transformers does not know it in such files, or changes its values"
    raise _unsupported(path, architecture, f"{why}; {', '.join(_STREAMED)} are streamed")


def _unsupported(path: Path, architecture: str, why: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{str(path)!r} is of the architecture {architecture!r} and cannot be streamed: "
        f"{why.rstrip('.')}. {_ELSEWHERE}"
    )


_KNOWN: Final = tuple(
    kind.process
    for kind in (
        library.TensorProcessor,
        library.LlamaTensorProcessor,
        library.Gemma2TensorProcessor,
        library.NemotronTensorProcessor,
        library.Qwen2MoeTensorProcessor,
    )
)


def _change(processor: Any, name: str, entry: TensorEntry) -> tuple[Change, tuple[int, ...]]:
    """Find what the library does to a tensor's rows, by numbers in their place, and its shape.

    An order of rows is the same within each of some groups, the smallest that there are.
    """
    import numpy as np

    rows = entry.shape[0] if entry.shape else 1
    numbers = np.arange(rows).reshape(-1, *[1] * (len(entry.shape) - 1))
    try:
        made = processor.process(weights=numbers, name=name).weights
    except ValueError as error:
        raise CheckpointError(
            f"tensor {name!r} in {str(entry.file)!r} has {rows} rows, which are not of as many "
            "heads as the file says. Download it again."
        ) from error
    shape = entry.shape if len(entry.shape) > 1 else made.shape
    order = made.reshape(-1)
    if (order - np.arange(rows) == order[0]).all():
        return Change(added=float(order[0])), shape
    # A group is whole where the numbers that came are those that should have come.
    ends = np.flatnonzero(np.maximum.accumulate(order) == np.arange(rows)) + 1
    group = int(ends[ends > 1][0]) if (ends > 1).any() else rows
    while group < rows and not _repeats(order, group):
        group = int(ends[ends > group][0])
    return Change(tuple(int(row) for row in order[:group])), shape


def _repeats(order: Any, group: int) -> bool:
    """Whether an order is that of its first group again and again."""
    import numpy as np

    if len(order) % group:
        return False
    starts = np.arange(0, len(order), group)[:, None]
    return bool((order.reshape(-1, group) == order[:group] + starts).all())


def _warn(opened: GgufCheckpoint, model: PreTrainedModel) -> None:
    """Say what the file holds and a plain load does without."""
    entries, said = opened.checkpoint.entries, opened.metadata
    scaling = [name for name in entries if name.split(".")[0] in _SCALING]
    stretched = said.get(f"{opened.architecture}.rope.scaling.type", "none")
    if scaling or stretched != "none":
        _log.warning(
            "%s stretches positions for long texts (%s), and transformers leaves that out of what "
            "it makes of GGUF files, here as in a plain load: long prompts give other results than "
            "the original model's",
            opened.checkpoint.files[0].name,
            scaling[0] if scaling else f"rope scaling of type {stretched}",
        )
    _warn_of_end(said, model)


def _warn_of_end(said: Mapping[str, Any], model: PreTrainedModel) -> None:
    known, lost = _ends(said, model)
    if lost:
        _log.warning(
            "the file ends answers with token %s, which transformers does not know of, here as in "
            "a plain load: set model.generation_config.eos_token_id = %s to have them end there",
            " and ".join(map(str, lost)),
            known + lost,
        )


def end_tokens(file: Path, model: PreTrainedModel) -> list[int]:
    """List the tokens that end an answer: those that the library knows, and the file's others.

    Raises:
        CheckpointError: the file is malformed.
        ReadError: the system could not read it.
    """
    known, lost = _ends(open_gguf(file).metadata, model)
    return known + lost


def _ends(said: Mapping[str, Any], model: PreTrainedModel) -> tuple[list[int], list[int]]:
    """Tokens that end an answer to the library, and to the file beside those."""
    config = getattr(model, "generation_config", None)
    found = getattr(config, "eos_token_id", None)
    known = [*found] if isinstance(found, list) else [] if found is None else [found]
    named = (said.get(f"tokenizer.ggml.{word}_token_id") for word in _ENDS)
    lost = [end for end in dict.fromkeys(named) if isinstance(end, int) and end not in known]
    return known, lost if config is not None else []
