"""A model that was named on the command line: checked, and loaded whole."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import transformers
from transformers.utils.hub import cached_file

import pipeload
from pipeload.checkpoint.headers import lacking
from pipeload.cli.log_lines import log
from pipeload.cli.model_path import check_path
from pipeload.entry.sources import is_gguf, source_of
from pipeload.entry.texts import first_line
from pipeload.errors import CheckpointError, OptionError, PipeloadError
from pipeload.hf.gguf import check_gguf

if TYPE_CHECKING:
    from collections.abc import Iterator

_ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
DTYPES = {"auto": "auto", "bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


class Asked(Protocol):
    """What every command that answers is told of a model."""

    @property
    def memory_limit(self) -> str:
        """As it was typed."""

    @property
    def device(self) -> str:
        """Where it computes."""

    @property
    def host_memory_limit(self) -> str | None:
        """Of the process, where it computes elsewhere."""

    @property
    def io_mode(self) -> str:
        """How files are read."""

    @property
    def dtype(self) -> str:
        """A key of `DTYPES`."""


def check_model(model: str, *, files: bool = False) -> None:
    """Refuse what is no model before anything is loaded, or asked of the hub in vain.

    With `files` it may be a GGUF file.

    Raises:
        OptionError: there is no such folder or hub model.
        CheckpointError: the folder holds no model, or its configuration cannot be read.
        UnsupportedModelError: it is a GGUF file that cannot be streamed.
    """
    check_path(model, files=files)
    path = Path(model)
    if path.is_dir():
        if (path / "config.json").exists():
            with explained(model):
                transformers.AutoConfig.from_pretrained(model, trust_remote_code=False)
        return
    if is_gguf(model):
        with explained(model):
            check_gguf(path.parent, path.name)
        return
    log.info("no folder %r here: asking the model hub", model)
    try:
        transformers.AutoConfig.from_pretrained(model, trust_remote_code=False)
    except Exception as error:  # as above
        raise OptionError(
            f"{model!r} is no folder here, and the hub gave no model: {first_line(error)}. Check "
            "the name."
        ) from error


@contextlib.contextmanager
def explained(model: str, action: str = "load") -> Iterator[None]:
    """Turn what the library raises while it is to `action` a model into one line.

    Raises:
        CheckpointError: it cannot be done.
    """
    try:
        yield
    except PipeloadError:
        raise
    except Exception as error:  # a configuration can make the library raise nearly anything
        raise CheckpointError(
            f"cannot {action} {model!r}: {first_line(error)}. Check the checkpoint; --debug shows "
            "where it failed."
        ) from error


def adapter_files(model: str) -> list[Path]:
    """The files of the adapter that is loaded by that name of a folder or the hub; none of a base.

    The hub is not asked: what was loaded is here.
    """
    if Path(model).is_file():
        return []
    found = (
        cached_file(
            model,
            name,
            local_files_only=True,
            _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        for name in _ADAPTER_FILES
    )
    return [Path(path) for path in found if path is not None]


def traced(model: Any, file: Path | None) -> contextlib.AbstractContextManager[object]:
    """Inside, a trace is written of it, if a file is given."""
    return contextlib.nullcontext() if file is None else pipeload.handle(model).trace(file)


def load_with(model: str, asked: Asked, **more: Any) -> Any:
    """A model under the limit, and with the options, that were asked for; see `load_whole`."""
    return load_whole(
        model,
        memory_limit=asked.memory_limit,
        device=asked.device,
        host_memory_limit=asked.host_memory_limit,
        io_mode=asked.io_mode,
        dtype=DTYPES[asked.dtype],
        **more,
    )


def load_whole(model: str, **options: Any) -> Any:
    """A streamed model all of whose weights are in its checkpoint.

    Raises:
        CheckpointError: some are not. The library only warns of those, and makes them up.
    """
    source, named = source_of(model)
    with explained(model):
        loaded, report = pipeload.from_pretrained(
            source, trust_remote_code=False, output_loading_info=True, **named, **options
        )
    if missing := sorted(report["missing_keys"]):
        loaded.pipeload.remove()
        raise lacking(model, missing)
    return loaded
