"""Where a model's own quantised copy may be: beside it, or in the caches of models.

`pipeload quantize` writes the digest of what it has read into the copy's config.json; whoever has
the same files finds the copy by it, whatever the folders are called.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import huggingface_hub.constants
import transformers

from pipeload.checkpoint.fingerprint import SOURCE_DIGEST, fingerprint
from pipeload.checkpoint.untrusted_json import is_file, read_json
from pipeload.entry.sources import source_of
from pipeload.entry.texts import load_tokenizer
from pipeload.errors import CheckpointError, OptionError, PipeloadError
from pipeload.system.user_cache import user_cache

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping

    from pipeload.checkpoint.file_reads import FileSet

_MOST_FOLDERS = 1000
_SUFFIX = ".safetensors"
_WHERE_FILES_ARE = (
    *("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder"),
    *("token", "gguf_file"),
)
"""Arguments that say which files of a model are meant: of its tokenizer, too."""


def find_own_copy(pretrained: str | os.PathLike[str], files: FileSet) -> Path | None:
    """Find a quantised copy of a checkpoint, the smallest if there are several; None without any.

    Args:
        pretrained: as the model was named.
        files: its checkpoint's.

    Raises:
        ReadError: the checkpoint cannot be read.
    """
    named = [(folder, digest) for folder in _places(pretrained) if (digest := _named_by(folder))]
    if not named:
        return None
    wanted = fingerprint(files)
    found = [folder for folder, digest in named if digest == wanted and _is_known(folder)]
    return min(found, key=weights_bytes, default=None)


def weights_bytes(folder: Path) -> int:
    """Those of all files of weights in a folder."""
    return sum(file.stat().st_size for file in folder.glob(f"*{_SUFFIX}") if is_file(file))


def held_bytes(folder: Path) -> int:
    """What a model holds that is all in memory: its weights, but for a table that is looked up."""
    nbytes = weights_bytes(folder)
    config: Any = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    text = config.get_text_config(decoder=True)
    if not getattr(text, "tie_word_embeddings", False):
        dtype = getattr(text, "dtype", None) or getattr(config, "dtype", None)
        nbytes -= text.vocab_size * text.hidden_size * getattr(dtype, "itemsize", 2)
    return max(nbytes, 0)


def _places(pretrained: str | os.PathLike[str]) -> Iterator[Path]:
    """Folders that hold models, `_MOST_FOLDERS` at most; that of the model itself is not one."""
    hub = Path(huggingface_hub.constants.HF_HUB_CACHE)
    above = [(hub, "models--*/snapshots/*")]
    with contextlib.suppress(RuntimeError):  # nobody knows where the user's home is
        above.insert(0, (user_cache(), "*"))
    if Path(pretrained).is_dir():
        above.insert(0, (Path(pretrained).resolve().parent, "*"))
    seen: set[Path] = set()
    for folder, pattern in above:
        try:
            inside = sorted(path for path in folder.glob(pattern) if path.is_dir())
        except OSError:  # a folder that may not be looked into holds nothing for us
            continue
        for path in inside[:_MOST_FOLDERS]:
            if path not in seen and not path.name.startswith("."):
                seen.add(path)
                yield path


def _is_known(folder: Path) -> bool:
    """Whether this library knows such a model: a newer one may have made it."""
    try:
        transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception:  # a configuration can make the library raise nearly anything
        return False
    return True


def _named_by(folder: Path) -> str | None:
    """The digest of what a checkpoint was made of, if it says so and can be read."""
    path = folder / "config.json"
    if not is_file(path):
        return None
    try:
        told = read_json(path)
    except PipeloadError:  # somebody else's folder: what is wrong with it is no concern of ours
        return None
    digest = told.get(SOURCE_DIGEST) if isinstance(told, dict) else None
    return digest if isinstance(digest, str) else None


def check_same_tokens(
    draft: str, target: str, model: Any, loaded_with: Mapping[str, Any] | None = None
) -> None:
    """Refuse a draft whose tokens are not the model's.

    `loaded_with`: the library's arguments that `model` was loaded from `target` with.

    Raises:
        OptionError: they are others.
        CheckpointError: the draft's configuration cannot be read.
    """
    source, named = source_of(draft)
    try:
        config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=False, **named)
        theirs = config.get_text_config(decoder=True).vocab_size
    except Exception as error:  # a configuration can make the library raise nearly anything
        raise CheckpointError(
            f"draft={draft!r} cannot be loaded ({type(error).__name__}). Name a folder or a hub id "
            "of a model of the same family, such as the model's own copy by `pipeload quantize`."
        ) from error
    ours = model.config.get_text_config(decoder=True).vocab_size
    if theirs == ours:
        try:
            given = {k: v for k, v in (loaded_with or {}).items() if k in _WHERE_FILES_ARE}
            words = [
                load_tokenizer(name, **named).get_vocab()
                for name, named in ((draft, {}), (target, given))
            ]
        except CheckpointError:  # one without: nobody can say more than their number
            return
        if words[0] == words[1]:
            return
        theirs, ours = map(len, words)
    raise OptionError(
        f"the draft {draft!r} has other tokens than {target!r} ({theirs} and {ours} are known to "
        "them). Use a model of the same family, such as the model's own copy by "
        "`pipeload quantize`."
    )
