"""Sums of products of each two inputs of a Linear, in blocks of columns, kept on disk.

For 7 billion weights they are 2 GB, so only those of the Linear that runs are in memory: a pass
writes each once, to a file of its own, named by the windows of text that were read before it. A
pass that was killed has left a file that the next one with the same beginning writes anew.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import torch

from pipeload.formats.integers.compensation import BLOCK, blocks_of
from pipeload.quantiser.resumable_shards import PRODUCTS
from pipeload.quantiser.tensor import bytes_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from pipeload.quantiser.resumable_shards import Output

_ROWS: Final = 1024  # of input at once, in fp32


class InputProducts:
    """Of all Linears, by their paths."""

    def __init__(self, output: Output, columns: Mapping[str, int]) -> None:
        """Begin, or go on with what is in the folder; `columns`: of each Linear."""
        self._output, self._columns = output, dict(columns)
        self._places: dict[str, int] = {}
        place = 0
        for path in sorted(columns):  # a file may be gone on with
            self._places[path] = place
            place += sum(self._sizes(path)) * torch.float32.itemsize
        # Filled, so that the plan sees what adding takes: sums of the widest, and rows of input.
        widest = max(columns.values(), default=0)
        self._sums = torch.empty(widest * BLOCK).fill_(0)
        self._rows = torch.empty(_ROWS * BLOCK).fill_(0)
        self._file, self._written = "", set[str]()

    def begin(self, windows_done: int) -> None:
        """Begin a pass, before which so many windows of the text were read.

        What another one has left that was killed behind these is not added to.
        """
        for start, file in self._files():
            if start >= windows_done:
                file.unlink()
        self._file, self._written = f"{PRODUCTS}{windows_done}.bin", set()

    def add(self, path: str, inputs: torch.Tensor) -> None:
        """Add rows of input, [..., columns], of the Linear at `path`.

        Raises:
            OptionError: the disk is full, or cannot be written to.
        """
        columns = self._columns[path]
        total = self._sums[: sum(self._sizes(path))].zero_()
        if path in self._written:  # it runs more than once in a pass
            total += self._read(self._output.folder / self._file, path)
        self._written.add(path)
        for block, sums in zip(blocks_of(columns), self._blocks(path, total), strict=True):
            for some in inputs.reshape(-1, columns).split(_ROWS):
                rows = self._rows[: len(some) * len(block)].view(-1, len(block))
                rows.copy_(some[:, block.start : block.stop])
                sums.addmm_(rows.t(), rows)
        self._output.write_at(self._file, self._places[path], bytes_of(total))

    def end(self) -> None:
        """See that what the pass has written outlives a power cut. Raises what `add` does."""
        if self._written:
            self._output.sync(self._file)

    def finish(self) -> None:
        """Give back what adding takes: nothing is added any more."""
        self._sums = self._rows = torch.empty(0)

    def of(self, path: str, windows_done: int) -> list[torch.Tensor]:
        """Sum over the text up to that window, fp32 of [columns, columns] for each block."""
        total = torch.zeros(sum(self._sizes(path)))
        for start, file in self._files():
            if start < windows_done:
                total += self._read(file, path)
        return self._blocks(path, total)

    def _files(self) -> list[tuple[int, Path]]:
        """Those of all passes, by how many windows were read before each."""
        found = (
            (re.fullmatch(rf"{PRODUCTS}(\d+)\.bin", file.name), file)
            for file in self._output.folder.iterdir()
        )
        return sorted((int(name[1]), file) for name, file in found if name)

    def _read(self, file: Path, path: str) -> torch.Tensor:
        """All that is stored of a Linear; zeros where it has not run."""
        nbytes = sum(self._sizes(path)) * torch.float32.itemsize
        with file.open("rb") as opened:
            opened.seek(self._places[path])
            content = bytearray(opened.read(nbytes).ljust(nbytes, b"\0"))
        return torch.frombuffer(content, dtype=torch.float32)

    def _sizes(self, path: str) -> list[int]:
        return [len(block) ** 2 for block in blocks_of(self._columns[path])]

    def _blocks(self, path: str, numbers: torch.Tensor) -> list[torch.Tensor]:
        sides = [len(block) for block in blocks_of(self._columns[path])]
        parts = numbers.split(self._sizes(path))
        return [one.view(side, side) for one, side in zip(parts, sides, strict=True)]
