"""Checks that the stored tensors of a weight of bitsandbytes belong together.

Touches private parts of bitsandbytes, seen in 0.50.2.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import torch

from pipeload.checkpoint.untrusted_json import show
from pipeload.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pipeload.checkpoint.headers import TensorEntry

NESTED = ("weight.nested_absmax", "weight.nested_quant_map")
"""What is stored where statistics are quantised, too."""
_BLOBS = ("weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4")
_MAX_BLOB_BYTES = 4096
_ROWS_FORMAT = 0  # int8 weights row by row, the only order the library still knows


class StoredParts:
    """The stored tensors of one weight, by what the library calls them."""

    def __init__(
        self,
        name: str,
        parts: Mapping[str, TensorEntry],
        read: Callable[[TensorEntry], torch.Tensor],
        rows: int,
        columns: int,
    ) -> None:
        """Nothing is checked yet. `rows` and `columns` are what the module has."""
        self._name, self._parts, self._read = name, parts, read
        self._rows, self._columns = rows, columns

    def check_4bit(self) -> dict[str, Any]:
        """Check a weight of 4 bits; return its quantisation state.

        Raises:
            CheckpointError: a tensor is missing, malformed or of another weight.
            ReadError: the state could not be read.
        """
        blobs = [name for name in _BLOBS if name in self._parts]
        nested = [name for name in NESTED if name in self._parts]
        wanted = ["weight", "weight.absmax", "weight.quant_map", *(NESTED if nested else ())]
        self._require(wanted)
        if len(blobs) != 1:
            raise self._malformed(f"it has {len(blobs)} quantisation states, wanted one")
        state = self._read_state(self._parts[blobs[0]])
        items = self._rows * self._columns
        if state.get("shape") != [self._rows, self._columns]:
            raise self._malformed(
                f"its quantisation state is for shape {show(state.get('shape'))}, and the module "
                f"has {[self._rows, self._columns]}"
            )
        for name in ("blocksize", *(["nested_blocksize"] if nested else [])):
            if not isinstance(state.get(name), int) or state[name] < 1:
                raise self._malformed(f"its quantisation state has {name}={show(state.get(name))}")
        if not hasattr(torch, str(state.get("dtype"))):
            raise self._malformed(f"its quantisation state has dtype={show(state.get('dtype'))}")
        blocks = -(-items // state["blocksize"])
        self._require_bytes("weight", math.ceil(items / 2))
        self._require_items("weight.quant_map", 16, "F32")
        self._require_items("weight.absmax", blocks, "U8" if nested else "F32")
        if nested:
            self._require_items(NESTED[0], -(-blocks // state["nested_blocksize"]), "F32")
            self._require_items(NESTED[1], 256, "F32")
            if not isinstance(state.get("nested_offset"), float):
                raise self._malformed("its quantisation state has no nested_offset")
        return state

    def check_8bit(self) -> None:
        """Check a weight of 8 bits. Raises what `check_4bit` does."""
        self._require(["weight", "SCB"])
        if self._parts["weight"].shape != (self._rows, self._columns):
            raise self._malformed(
                f"its shape is {list(self._parts['weight'].shape)}, and the module has "
                f"{[self._rows, self._columns]}"
            )
        self._require_bytes("weight", self._rows * self._columns)
        self._require_items("SCB", self._rows, "F32")
        stored = self._parts.get("weight_format")
        if stored is not None and int(self._read(stored).sum()) != _ROWS_FORMAT:
            raise self._malformed("its values are not stored row by row")

    def _read_state(self, entry: TensorEntry) -> dict[str, Any]:
        if entry.dtype != "U8" or entry.nbytes > _MAX_BLOB_BYTES:
            raise self._malformed(
                f"its quantisation state is {entry.nbytes} bytes of {entry.dtype}"
            )
        try:
            state = json.loads(bytes(self._read(entry).numpy()))
        except (ValueError, RecursionError) as error:
            raise self._malformed(f"its quantisation state cannot be read ({error})") from error
        if not isinstance(state, dict) or state.get("quant_type") not in {"nf4", "fp4"}:
            raise self._malformed(f"its quantisation state is {show(state)}")
        if not entry.name.endswith(state["quant_type"]):
            raise self._malformed(f"its quantisation state says {show(state['quant_type'])}")
        return state

    def _require(self, names: Sequence[str]) -> None:
        missing = [name for name in names if name not in self._parts]
        if missing:
            raise self._malformed(f"its {', '.join(missing)} is missing")

    def _require_items(self, name: str, count: int, dtype: str) -> None:
        entry = self._parts[name]
        if math.prod(entry.shape) != count or entry.dtype != dtype:
            raise self._malformed(
                f"tensor {show(entry.name)} is {list(entry.shape)} of {entry.dtype}, wanted "
                f"{count} of {dtype}"
            )

    def _require_bytes(self, name: str, count: int) -> None:
        entry = self._parts[name]
        if entry.nbytes != count:
            raise self._malformed(
                f"tensor {show(entry.name)} has {entry.nbytes} bytes, wanted {count}"
            )

    def _malformed(self, what: str) -> CheckpointError:
        file = next((str(entry.file) for entry in self._parts.values()), "the checkpoint")
        return CheckpointError(
            f"Quantised weight {show(self._name)} in {file!r} is unusable: {what}. Download the "
            "checkpoint again, or quantise the model again."
        )
