"""The format of GGUF files: floats are made of blocks each time they are read."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from pipeload.errors import UnsupportedModelError
from pipeload.formats.format import Format

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch

    from pipeload.checkpoint.headers import TensorEntry
    from pipeload.formats.format import PackedWeight, Stored

METHOD: Final = "gguf"
_ALIGN: Final = 16  # bytes: what kernels look at of an address; plain's weights lie at such places


class Gguf(Format):
    """A `Format`. One is made for each model: it knows how its rows are ordered."""

    method = METHOD
    how = "unpacked to the floats of a plain load each time it is read"
    package = "gguf"

    def __init__(self, orders: Mapping[str, tuple[int, ...]] | None = None) -> None:
        """`orders` are those of weights whose rows are not the model's, by name: see `Blocks`."""
        self._orders = orders or {}

    def order_of(self, name: str) -> tuple[int, ...]:
        """Find the order of a weight's rows; none where it is the model's."""
        return self._orders.get(name, ())

    def find(self, stored: Stored) -> Mapping[str, PackedWeight]:
        """Find the weights that are in blocks, or to be put in order, or cast as tables are.

        Raises:
            UnsupportedModelError: one is of a type that nobody unpacks here, or made of several.
        """
        from pipeload.formats.gguf.block_weight import BlockWeight

        found: dict[str, PackedWeight] = {}
        for name, parameter in stored.model.named_parameters():
            entries = list(stored.parts(name).values())
            if any(self._is_ours(name, entry, stored) for entry in entries):
                self._check(name, entries, stored)
                if entries[0].shape == tuple(parameter.shape):
                    order = self.order_of(name)
                    found[name] = BlockWeight(name, stored.dtype(name), entries[0], order)
        return found

    def tensors(
        self, stored: Stored, entries: Iterable[TensorEntry]
    ) -> Mapping[str, torch.Tensor] | None:
        """Read and unpack stored tensors that are not streamed.

        Raises:
            ReadError: one could not be read.
        """
        import torch

        from pipeload.formats.gguf.blocks import Blocks

        read, made = stored.reader(), {}
        dtype: Any = stored.model.dtype  # as a plain load: first to this, then to its own
        for entry in entries:
            order = self.order_of(entry.name)
            rows = entry.shape[0] if len(entry.shape) > 1 else 1
            width = entry.nbytes // max(1, rows)
            values = torch.empty(entry.shape)
            raw = read(replace(entry, dtype="U8", shape=(rows, width)))
            Blocks(entry.dtype, width, order if rows > 1 else ()).fill(raw, values.view(rows, -1))
            if order and rows == 1:  # of single values, as of rows
                values = values.view(-1, len(order))[:, list(order)].reshape(entry.shape)
            made[entry.name] = values.to(dtype)
        return made

    def _is_ours(self, name: str, entry: TensorEntry, stored: Stored) -> bool:
        """Whether the file's bytes are not the weight, or do not lie as a plain load has them."""
        from pipeload.formats.gguf.kernel import FLOATS

        if len(entry.shape) < 2:  # of one row: small, and the library's if it is in blocks
            return name in self._orders and entry.dtype in FLOATS
        if name in self._orders:
            return True
        dtype = FLOATS.get(entry.dtype)
        return dtype != stored.dtype(name) or entry.start % _ALIGN > 0

    def _check(self, name: str, entries: list[TensorEntry], stored: Stored) -> None:
        from pipeload.formats.gguf.kernel import can_unpack

        entry, dtype = entries[0], stored.dtype(name)
        if len(entries) > 1:
            why = "is made of several tensors"
        elif not can_unpack(entry.dtype):
            why = f"is of type {entry.dtype}, which the installed package gguf does not unpack"
        elif dtype != stored.model.get_parameter(name).dtype:
            # A plain load casts twice, then: to the one dtype first.
            why = f"is kept in {dtype} whatever dtype= says"
        else:
            return
        raise UnsupportedModelError(
            f"{name!r} in {str(entry.file)!r} {why}, and cannot be streamed so. Take a file of "
            "another type, such as Q4_K_M or Q8_0, or the model's safetensors checkpoint."
        )


GGUF: Final = Gguf()
