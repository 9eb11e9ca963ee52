"""What all ranks must have in common for their blocks to be one model, bit for bit."""

from __future__ import annotations

import json
import platform
import zlib
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pipeload.errors import GroupError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from pipeload.checkpoint.headers import TensorEntry

_SAMPLE_BYTES = 4096
_MOST_SAMPLES = 2000
_PACKAGES = ("pipeload", "torch", "transformers")
# Those by which libraries choose other kernels, whose sums differ in their last bits.
_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "avx512_vnni", "amx_tile", "amx_bf16")
_KINDS = ("vendor_id", "cpu family", "model", "CPU implementer", "CPU part")


def statement(
    config: Mapping[str, Any],
    entries: Mapping[str, TensorEntry],
    attention: str,
    kernels: Mapping[str, Any],
) -> dict[str, Any]:
    """What this rank has: JSON, to be compared with those of others.

    Args:
        config: the model's configuration.
        entries: the checkpoint's tensors by name, of which the middle of each is read.
        attention: how scores are computed.
        kernels: what multiplies weights, by names for people.

    Raises:
        OSError: a file could not be read.
    """
    return {
        "versions": {name: metadata.version(name) for name in _PACKAGES},
        "config": {
            name: _short(value) for name, value in config.items() if not name.startswith("_")
        },
        "tensors": {
            name: [entry.dtype, list(entry.shape), sample]
            for (name, entry), sample in zip(entries.items(), _samples(entries), strict=True)
        },
        "processor": {
            "machine": platform.machine(),
            "kernels of torch": torch.backends.cpu.get_cpu_capability(),
            **_processor(),
            "threads of torch": torch.get_num_threads(),
            **kernels,
        },
        "attention": attention,
    }


def _short(value: Any) -> str:
    return json.dumps(_public(value), sort_keys=True, default=str)


def _public(value: Any) -> Any:
    """Without names that begin with an underscore: where it was loaded from, and the like."""
    if not isinstance(value, dict):
        return value
    return {str(k): _public(v) for k, v in value.items() if not str(k).startswith("_")}


def _samples(entries: Mapping[str, TensorEntry]) -> Iterable[int | None]:
    """Checksums of bytes out of the middle of each tensor, or of as many as are read soon."""
    step = -(-len(entries) // _MOST_SAMPLES) or 1
    for place, entry in enumerate(entries.values()):
        if place % step:
            yield None
            continue
        nbytes = min(_SAMPLE_BYTES, entry.nbytes)
        with entry.file.open("rb", buffering=0) as file:
            file.seek(entry.start + (entry.nbytes - nbytes) // 2)
            yield zlib.crc32(file.read(nbytes))


def _processor() -> dict[str, str]:
    """Which one Linux says that it is, and what it can; nothing elsewhere."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return {}
    lines = (line.partition(":") for line in text.partition("\n\n")[0].splitlines())
    said = {name.strip(): value.strip() for name, _, value in lines}
    can = (said.get("flags") or said.get("Features") or "").split()
    known = {name: said[name] for name in _KINDS if name in said}
    return known | {"flags": " ".join(flag for flag in _FLAGS if flag in can)}


def check(
    statements: Sequence[Mapping[str, Any]], name: Callable[[int], str], *, mixed: bool
) -> bool:
    """Whether all ranks' processors compute alike.

    Args:
        statements: of each rank.
        name: of a rank, for people.
        mixed: whether processors may differ.

    Raises:
        GroupError: something else differs, or processors do and may not.
    """
    first = statements[0]
    for rank, other in enumerate(statements):
        for what in ("versions", "config", "tensors"):
            if (found := _difference(first[what], other[what])) is not None:
                key, wanted, got = found
                raise _disagrees(rank, name, f"{_WORDS[what]} {key!r}", got, wanted)
        if first["attention"] != other["attention"]:
            got, wanted = other["attention"], first["attention"]
            raise _disagrees(rank, name, "the attention", got, wanted)
    for rank, other in enumerate(statements):
        found = _difference(first["processor"], other["processor"])
        if found is not None and not mixed:
            key, wanted, got = found
            raise GroupError(
                f"{name(rank)} computes otherwise than {name(0)}: {key} is {got!r}, there "
                f"{wanted!r}, so last bits would be those of no single machine. Set the same "
                "number of threads (OMP_NUM_THREADS), the same options and a compiler on all or "
                'none, or pass ranks="mixed" to take such results.',
                rank=rank,
                host="",
            )
    return all(other["processor"] == first["processor"] for other in statements)


_WORDS = {"versions": "the version of", "config": "the setting", "tensors": "the tensor"}


def _difference(first: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[str, Any, Any] | None:
    """The first name with different values, and both: that of `first`, then the other."""
    for key in (*first, *other):
        if first.get(key) != other.get(key):
            return key, first.get(key), other.get(key)
    return None


def _disagrees(
    rank: int, name: Callable[[int], str], what: str, got: object, wanted: object
) -> GroupError:
    return GroupError(
        f"{name(rank)} has not the same model as {name(0)}: {what} is {_shown(got)} there, and "
        f"{_shown(wanted)} on rank 0. Give all ranks the same files and the same versions.",
        rank=rank,
        host="",
    )


def _shown(value: object) -> str:
    if value is None:
        return "missing"
    if isinstance(value, list):
        dtype, shape, sample = value
        return f"{dtype} {shape} with the checksum {sample}"
    return str(value)[:120]
