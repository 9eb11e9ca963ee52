"""A conversation on disk: what was said, and the keys and values of it, as a safetensors file.

[Note: whose keys and values] They mean something to the model alone that made them, and for the
tokens alone that stand beside them. So the file says whose they are and of what, and is refused
where either is another. It is written beside its name and put there once it is whole.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import torch

from pipeload.checkpoint.file_reads import FileSet
from pipeload.checkpoint.headers import read_header
from pipeload.checkpoint.writer import Tensor, make_header
from pipeload.errors import CheckpointError, OptionError, PipeloadError
from pipeload.hf.cache_layers import keys_and_values, made_cache
from pipeload.system.folder_lock import try_lock
from pipeload.weights.arena import DTYPES
from pipeload.weights.read_tensor import read_whole

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pipeload.checkpoint.headers import TensorEntry

_TALK = "conversation"
_PART = ".pipeload.part"
_RANDOM = "?" * 8  # what tempfile puts before that
_CODES = {dtype: code for code, dtype in DTYPES.items()}


class Talk(NamedTuple):
    """Where a conversation stands."""

    messages: list[dict[str, str]]
    text: str
    """What `ids` are the tokens of."""
    ids: torch.Tensor
    """int64, `[1, tokens]`."""
    cache: Any
    """Of these tokens, but for the last ones; None: it is to be computed anew."""
    one_text: bool = False
    """Whether there are no turns in it, as without a chat template."""


class ConversationFile:
    """Keeps one conversation. Its tensors: that of the words, as JSON, and two for each layer."""

    def __init__(self, path: Path, model: str) -> None:
        """`model`: the fingerprint of its checkpoint, and its dtype."""
        self._path, self._model = path, model

    def load(self, device: torch.device, *, most_tokens: int) -> Talk | None:
        """What is there, for a model on `device`; None where there is no file.

        Raises:
            OptionError: it is no conversation, a part of one, of another model, or longer than
                `most_tokens`.
            CheckpointError: it is damaged.
            ReadError: the disk failed.
        """
        if not self._path.exists():
            return None
        try:
            entries = read_header(self._path)
        except CheckpointError as error:  # whose cure would be to download it again
            raise self._no_conversation("Delete it if it was one, or name another file.") from error
        if _TALK not in entries:
            raise self._no_conversation("Name another file.")
        with contextlib.closing(FileSet([self._path], "buffered")) as files:
            told = self._told(bytes(read_whole(entries[_TALK], files).tolist()))
            ids = torch.tensor([told["ids"]], dtype=torch.long)
            self._check_layers(entries, told["layers"], ids.shape[1])
            if ids.shape[1] >= most_tokens:
                raise OptionError(
                    f"the conversation in {str(self._path)!r} has {ids.shape[1]} tokens, and "
                    f"memory is kept free for {most_tokens}. Raise --tokens, or name another file."
                )
            cache = _cache(entries, files, device) if told["layers"] else None
            one_text = told.get("one_text", False) is True
            return Talk(told["messages"], told["text"], ids, cache, one_text)

    def _told(self, data: bytes) -> dict[str, Any]:
        try:
            told: dict[str, Any] = json.loads(data)
            said = told["messages"], told["text"], told["ids"], told["layers"]
            whole = _is_said(*said) and told["prompt"] == _digest(*said)
            theirs = told["model"]
        except (ValueError, KeyError, TypeError) as error:
            raise self._damaged() from error
        if not whole:
            raise self._damaged()
        if theirs != self._model:
            raise OptionError(
                f"the conversation in {str(self._path)!r} is another model's, or its files have "
                "changed since, or its dtype: keys and values would mean nothing to it. Name "
                "another file."
            )
        return told

    def _no_conversation(self, cure: str) -> OptionError:
        return OptionError(f"{str(self._path)!r} is no whole conversation that was kept. {cure}")

    def _damaged(self) -> CheckpointError:
        return CheckpointError(
            f"the conversation in {str(self._path)!r} is damaged: its words are not those of its "
            "keys and values. Delete the file, or restore it."
        )

    def _check_layers(self, entries: dict[str, TensorEntry], layers: int, tokens: int) -> None:
        """Whether there are keys and values of all layers, for these tokens but the last one."""
        names = {f"{layer}.{what}" for layer in range(layers) for what in ("keys", "values")}
        shapes = [entry.shape for name, entry in entries.items() if name != _TALK]
        lengths = {shape[2] if len(shape) == 4 and shape[0] == 1 else None for shape in shapes}
        whole = lengths in ({tokens}, {tokens - 1}) if layers else not lengths
        if entries.keys() - {_TALK} != names or not whole:
            raise self._damaged()

    def check(self) -> None:
        """Find out before an answer is computed whether it could be kept.

        Raises:
            OptionError: it could not.
        """
        with self._explained(), _part(self._path):
            pass

    def save(self, talk: Talk) -> None:
        """Have the file hold this, or what it held before.

        Raises:
            OptionError: it cannot be written, or the model keeps more than keys and values.
        """
        pairs: list[tuple[torch.Tensor, torch.Tensor]] | None = []
        if talk.cache is not None:
            pairs = keys_and_values(talk.cache)
        if pairs is None:
            raise cannot_keep()
        ids = talk.ids[0].tolist()
        told = {
            "model": self._model,
            "prompt": _digest(talk.messages, talk.text, ids, len(pairs)),
            "messages": talk.messages,
            "text": talk.text,
            "ids": ids,
            "layers": len(pairs),
            "one_text": talk.one_text,
        }
        words = torch.frombuffer(bytearray(json.dumps(told).encode()), dtype=torch.uint8)
        tensors = {
            f"{layer}.{what}": tensor
            for layer, pair in enumerate(pairs)
            for what, tensor in zip(("keys", "values"), pair, strict=True)
        }
        with self._explained():
            self._write(tensors | {_TALK: words})

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OptionError(
                f"cannot write the conversation to {str(self._path)!r}: {error.strerror}. Name "
                "another file."
            ) from error

    def _write(self, tensors: dict[str, torch.Tensor]) -> None:
        header = make_header(
            Tensor(name, _CODES[t.dtype], tuple(t.shape), t.numel() * t.element_size())
            for name, t in tensors.items()
        )
        with _part(self._path) as (part, file):
            file.write(header)
            for tensor in tensors.values():  # one after the other: a copy of each is made here
                data = tensor.detach().to("cpu").contiguous().view(-1).view(torch.uint8)
                file.write(data.numpy().tobytes())
            file.flush()
            os.fsync(file.fileno())
            file.close()
            part.replace(self._path)


def tokens_kept(path: Path, tokenizer: Any) -> int:
    """About how many tokens a conversation in a file has; 0 where that is not to be known.

    Whether it is one is found out by whoever loads it.
    """
    try:
        entries = read_header(path) if path.exists() else {}
        lengths = [entry.shape[2] for entry in entries.values() if len(entry.shape) == 4]
        if lengths or _TALK not in entries:
            return max(lengths, default=0)
        with contextlib.closing(FileSet([path], "buffered")) as files:  # its keys are to be made
            told = json.loads(bytes(read_whole(entries[_TALK], files).tolist()))
            return sum(len(tokenizer(said["content"])["input_ids"]) for said in told["messages"])
    except (PipeloadError, ValueError, KeyError, TypeError):
        return 0


def cannot_keep() -> OptionError:
    """The error that a model's conversations cannot be written."""
    return OptionError(
        "this model keeps more of a conversation than keys and values of each token, which "
        "--session does not know how to write. Leave it out; /save keeps the words."
    )


def _cache(entries: dict[str, TensorEntry], files: FileSet, device: torch.device) -> Any:
    def read(layer: int, what: str) -> torch.Tensor:
        return read_whole(entries[f"{layer}.{what}"], files).to(device)

    layers = range((len(entries) - 1) // 2)
    # One by one: each is copied, and all of them together would take twice the memory.
    return made_cache((read(layer, "keys"), read(layer, "values")) for layer in layers)


def _is_said(messages: object, text: object, ids: object, layers: object) -> bool:
    """Whether these are what their names say."""
    return (
        isinstance(messages, list)
        and all(isinstance(said, dict) and {*said} >= {"role", "content"} for said in messages)
        and isinstance(ids, list)
        and all(type(token) is int for token in ids)
        and isinstance(text, str)
        and isinstance(layers, int)
    )


def _digest(messages: list[Any], text: str, ids: list[int], layers: int) -> str:
    return hashlib.sha256(json.dumps([messages, text, ids, layers]).encode()).hexdigest()


@contextlib.contextmanager
def _part(path: Path) -> Iterator[tuple[Path, IO[bytes]]]:
    """A file beside `path`, for this user alone; gone at the end, if it is not moved.

    Others that were left by processes that were killed go, too: nobody has them locked.
    """
    for left in path.parent.glob(f"{glob.escape(path.name)}.{_RANDOM}{_PART}"):
        with contextlib.suppress(OSError), left.open("rb") as opened:
            if try_lock(opened.fileno()):
                left.unlink()
    descriptor, name = tempfile.mkstemp(_PART, f"{path.name}.", path.parent)
    try:
        with open(descriptor, "wb") as file:  # noqa: PTH123 - a descriptor
            try_lock(file.fileno())
            yield Path(name), file
    finally:
        Path(name).unlink(missing_ok=True)
