"""The format of GGUF files: floats are made of blocks each time they are read."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pipeload.errors import UnsupportedModelError
from pipeload.formats.format import Format

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import torch

    from pipeload.checkpoint.headers import TensorEntry
    from pipeload.formats.format import PackedWeight, Stored
    from pipeload.formats.gguf.blocks import Blocks

METHOD: Final = "gguf"
_ALIGN: Final = 16  # bytes: what kernels look at of an address; plain's weights lie at such places


class Change(NamedTuple):
    """What the library does to the values of a stored tensor."""

    order: tuple[int, ...] = ()
    """Of its rows: see `Blocks`."""
    added: float = 0
    """To each value."""


class Gguf(Format):
    """A `Format`. One is made for each model: it knows how its rows are ordered."""

    method = METHOD
    how = "unpacked to the floats of a plain load each time it is read"
    package = "gguf"

    def __init__(
        self, changes: Mapping[str, Change] | None = None, mapping: Sequence[Any] = ()
    ) -> None:
        """`changes` are those of tensors whose values are not the model's, by name."""
        self._changes, self.mapping = changes or {}, mapping

    def blocks_of(self, entry: TensorEntry) -> Blocks:
        """Say how the rows of a tensor are made; of a vector of floats, its values are rows."""
        from pipeload.formats.gguf.blocks import Blocks

        width = entry.nbytes // _rows(entry)
        return Blocks(entry.dtype, width, *self._changes.get(entry.name, ()))

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
                blocks = self.blocks_of(entries[0])
                made = BlockWeight(name, stored.dtype(name), entries, blocks)
                if made.weight.shape == tuple(parameter.shape):
                    found[name] = made
        return found

    def tensors(
        self, stored: Stored, entries: Iterable[TensorEntry]
    ) -> Mapping[str, torch.Tensor] | None:
        """Read and unpack stored tensors that are not streamed.

        Raises:
            ReadError: one could not be read.
        """
        import torch

        read, made = stored.reader(), {}
        dtype: Any = stored.model.dtype  # as a plain load: first to this, then to its own
        for entry in entries:
            blocks, rows = self.blocks_of(entry), _rows(entry)
            values = torch.empty(entry.shape)
            raw = read(replace(entry, dtype="U8", shape=(rows, blocks.row_bytes)))
            order = blocks.order if rows == 1 else ()  # of a vector in blocks: of its values
            blocks = replace(blocks, order=()) if order else blocks
            blocks.fill(raw, values.view(rows, -1))
            if order:
                values = values.view(-1, len(order))[:, list(order)].reshape(entry.shape)
            made[entry.name] = values.to(dtype)
        return made

    def _is_ours(self, name: str, entry: TensorEntry, stored: Stored) -> bool:
        """Whether the file's bytes are not the weight, or do not lie as a plain load has them."""
        from pipeload.formats.gguf.block_weight import is_stack
        from pipeload.formats.gguf.kernel import FLOATS

        if len(entry.shape) < 2:  # of one row: small, and the library's if it is in blocks
            return name in self._changes and entry.dtype in FLOATS
        if name in self._changes or is_stack(entry):
            return True
        dtype = FLOATS.get(entry.dtype)
        return dtype != stored.dtype(name) or entry.start % _ALIGN > 0

    def _check(self, name: str, entries: list[TensorEntry], stored: Stored) -> None:
        from pipeload.formats.gguf.block_weight import is_stack
        from pipeload.formats.gguf.kernel import can_unpack

        entry, dtype = entries[0], stored.dtype(name)
        if unknown := [one.dtype for one in entries if not can_unpack(one.dtype)]:
            why = f"is of type {unknown[0]}, which the installed package gguf does not unpack"
        elif len(entries) > 1 and not all(map(is_stack, entries)):
            why = "is made of several tensors"
        elif dtype != stored.model.get_parameter(name).dtype:
            # A plain load casts twice, then: to the one dtype first.
            why = f"is kept in {dtype} whatever dtype= says"
        else:
            return
        raise UnsupportedModelError(
            f"{name!r} in {str(entry.file)!r} {why}, and cannot be streamed so. Take a file of "
            "another type, such as Q4_K_M or Q8_0, or the model's safetensors checkpoint."
        )


def _rows(entry: TensorEntry) -> int:
    from pipeload.formats.gguf.kernel import FLOATS

    apart = len(entry.shape) > 1 or entry.dtype in FLOATS
    return max(1, entry.shape[0]) if apart and entry.shape else 1


GGUF: Final = Gguf()
