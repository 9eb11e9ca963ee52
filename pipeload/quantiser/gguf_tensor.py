"""Makes the bytes of a shard out of a GGUF file's tensors: integers for our kernels, or floats.

Codes of 4 bits are taken over. For other types there is no kernel that holds their codes: scales of
16 or 32 weights each go with more than 4 bits, or with values that are not evenly spread. Those
Linears are rounded again, from the floats of a plain load to int8, which costs least of all that
kernels take. Blocks are read a few rows at a time, whatever the size of a weight.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from pipeload._sizes import counted
from pipeload.checkpoint.file_reads import FileSet
from pipeload.checkpoint.headers import Checkpoint, lacking, stamps_of
from pipeload.checkpoint.writer import Tensor
from pipeload.errors import UnsupportedModelError
from pipeload.formats.form_names import GGUF
from pipeload.formats.gguf.codes import AS_INT4, GROUP, int4_of
from pipeload.formats.gguf.format import Gguf
from pipeload.formats.gguf.kernel import FLOATS
from pipeload.formats.integers.linear import Int4Linear, Int8Linear
from pipeload.formats.integers.order import BY_ROWS
from pipeload.formats.integers.quantizer import PipeloadConfig
from pipeload.formats.integers.rounding import Int4, to_int8
from pipeload.hf.coded_checkpoint import inner_linears
from pipeload.quantiser.forms import PART_BYTES
from pipeload.quantiser.resumable_shards import Step
from pipeload.quantiser.tensor import Integers, bytes_of, check_finite, integers, row_blocks
from pipeload.weights.arena import DTYPE_CODES
from pipeload.weights.read_tensor import read_whole

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pipeload.checkpoint.headers import TensorEntry
    from pipeload.formats.gguf.blocks import Blocks
    from pipeload.hf.pending_load import PendingLoad
    from pipeload.quantiser.tensor import Reading


class GgufTensors:
    """The tensors of a file under the model's names, and what each becomes."""

    def __init__(self, pending: PendingLoad) -> None:
        """Find out.

        Args:
            pending: the load of the file's model.

        Raises:
            CheckpointError: a weight is missing.
            UnsupportedModelError: nobody unpacks it here, or no Linear holds integers.
        """
        assert isinstance(pending.format, Gguf)  # noqa: S101 - for type checkers
        self._pending, self._format = pending, pending.format
        if pending.format.mapping:
            raise UnsupportedModelError(
                f"{str(pending.files[0])!r} is a mixture of experts, which convert does not take "
                "over. Use the file as it is, or `pipeload quantize` and the model's safetensors "
                "checkpoint."
            )
        _ = pending.packed  # refuses types that nobody unpacks
        stored = pending.checkpoint.entries
        self.dtype: torch.dtype = pending.model.dtype
        self.entries = sorted(stored.values(), key=lambda entry: (str(entry.file), entry.start))
        stamps = stamps_of(self.entries)
        self.files = FileSet(pending.files, "buffered", pending.read_timeout, stamps)
        code = DTYPE_CODES[self.dtype]
        named = {name: replace(entry, dtype=code) for name, entry in stored.items()}
        self.as_floats = pending.of(Checkpoint(pending.files, named))
        """The load of floats of the same shapes, of which nothing is really stored."""
        if missing := self.as_floats.missing():
            raise lacking(pending.folder, sorted(missing))
        self.linears: dict[str, nn.Linear] = {}
        """Those that become integers, by the names of their weights."""
        self._bits: dict[str, int] = {}
        for name, (_, linear) in inner_linears(self.as_floats).items():
            if bits := _bits(stored[name].dtype, linear.out_features, linear.in_features):
                self.linears[name], self._bits[name] = linear, bits
        if not self.linears:
            kinds = ", ".join(sorted({entry.dtype for entry in self.entries}))
            raise UnsupportedModelError(
                f"{str(pending.files[0])!r} has no Linear of integers that could be taken over: "
                f"its tensors are of {kinds}. Use `pipeload quantize` and the model's safetensors "
                "checkpoint."
            )
        kinds_of = Counter(stored[name].dtype for name, bits in self._bits.items() if bits == 8)
        self.rounded = dict(kinds_of.most_common())
        """How many Linears are rounded again, by what they were."""

    def config(self) -> PipeloadConfig:
        """What config.json is to say, but for a head that becomes integers."""
        four = 4 in self._bits.values()
        apart = [name for name, bits in self._bits.items() if four and bits == 8]
        mine = {id(linear) for linear in self.linears.values()}
        linears = [one for one in self._pending.model.named_modules() if type(one[1]) is nn.Linear]
        return PipeloadConfig(
            4 if four else 8,
            group_size=GROUP if four else None,
            method=GGUF,
            order=BY_ROWS if four else None,
            part_bytes=PART_BYTES,
            modules_to_not_convert=[path for path, one in linears if id(one) not in mine],
            modules={_path(name): {"bits": 8} for name in apart},
        )

    def about(self) -> str:
        """What integers are, in sentences."""
        said = "Scales and floats were rounded once, to the dtype above."
        taken = Counter(one.dtype for one in self.entries if self._bits.get(one.name) == 4)
        if taken:
            said = f"Integers of {listed(taken)} are the file's, code for code. {said}"
        if self.rounded:
            said += (
                f" No kernel takes the integers of {listed(self.rounded)}: they were rounded "
                "again, to int8 with one scale for each row."
            )
        return said

    def integers(
        self, entry: TensorEntry, name: str, config: PipeloadConfig, reading: Reading
    ) -> Step:
        """The tensors of a Linear whose weight is to be called `name`."""
        if self._bits.get(name) == 4:
            how = Integers(partial(_taken, entry, self.dtype), 4, GROUP, BY_ROWS)
            rows = partial(self._stored_rows, entry, reading)
        else:
            how = Integers(to_int8, 8, 0, "")
            rows = partial(self._finite_rows, entry, reading)
        parts = config.for_module(_path(name)).parts(*entry.shape)
        code, columns = DTYPE_CODES[self.dtype], entry.shape[1]
        return integers(name, columns, code, how, parts=parts, rows=rows)

    def parts(self, name: str, config: PipeloadConfig) -> int:
        """In how many the weight of a Linear is stored."""
        linear = self.linears[name]
        own = config.for_module(_path(name))
        return len(own.parts(linear.out_features, linear.in_features))

    def floats(self, entry: TensorEntry, reading: Reading) -> Step:
        """A tensor as a plain load makes it."""
        nbytes = math.prod(entry.shape) * self.dtype.itemsize
        tensor = Tensor(entry.name, DTYPE_CODES[self.dtype], entry.shape, nbytes)
        return Step((tensor,), partial(self._float_pieces, entry, reading))

    def _float_pieces(self, entry: TensorEntry, reading: Reading) -> Iterator[memoryview]:
        if len(entry.shape) == 2:
            for rows in self._float_rows(entry, reading, 0, entry.shape[0]):
                yield bytes_of(rows)
        else:  # small
            made = self._format.tensors(self._pending, [entry]) or {}
            yield bytes_of(made[entry.name])

    def _finite_rows(
        self, entry: TensorEntry, reading: Reading, first: int, last: int
    ) -> Iterator[torch.Tensor]:
        for rows in self._float_rows(entry, reading, first, last):
            check_finite(rows, entry)
            yield rows

    def _float_rows(
        self, entry: TensorEntry, reading: Reading, first: int, last: int
    ) -> Iterator[torch.Tensor]:
        """Rows as floats of the model's dtype, some at a time."""
        for start, stop in row_blocks(first, last, entry.shape[1], reading):
            stored, blocks = self._read(entry, start, stop)
            made = torch.empty((stop - start, entry.shape[1]), dtype=self.dtype)
            blocks.fill(stored, made)
            yield made

    def _stored_rows(
        self, entry: TensorEntry, reading: Reading, first: int, last: int
    ) -> Iterator[torch.Tensor]:
        """Rows as they are stored, in the model's order, some at a time."""
        for start, stop in row_blocks(first, last, entry.shape[1], reading):
            stored, blocks = self._read(entry, start, stop)
            places = blocks.places(stop - start)
            yield stored if places is None else stored[torch.tensor(places)]

    def _read(self, entry: TensorEntry, start: int, stop: int) -> tuple[torch.Tensor, Blocks]:
        """All stored rows that some rows are made of, and how those are."""
        width = entry.nbytes // entry.shape[0]
        rows, blocks = self._format.blocks_of(entry).part(start, stop)
        begin, end = entry.start + rows.start * width, entry.start + rows.stop * width
        part = replace(entry, dtype="U8", shape=(len(rows), width), start=begin, stop=end)
        return read_whole(part, self.files), blocks


def listed(kinds: Mapping[str, int]) -> str:
    """As "28 Linears of Q6_K, 1 Linear of Q8_0"."""
    return ", ".join(f"{counted(count, 'Linear')} of {kind}" for kind, count in kinds.items())


def _bits(kind: str, rows: int, columns: int) -> int:
    """Of the integers that a Linear becomes; 0 if it is floats, or becomes those."""
    if kind in AS_INT4:
        return 4 if Int4Linear.fits(rows, columns, GROUP) else 0
    return 8 if kind not in FLOATS and Int8Linear.fits(rows, columns) else 0


def _taken(entry: TensorEntry, dtype: torch.dtype, stored: torch.Tensor) -> Int4:
    made = int4_of(stored, entry.dtype, dtype)
    check_finite(made.scales_and_zeros, entry)
    return made


def _path(name: str) -> str:
    """Of the module whose weight is called that."""
    return name.removesuffix(".weight")
