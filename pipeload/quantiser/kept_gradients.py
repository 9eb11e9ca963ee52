"""What going back through a model has found so far, kept so that a killed run goes on behind it.

After each block the sums of all and the gradient for the next one are written. What blocks were
called with is not kept: the windows of text that a run was killed in go forward once more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from pipeload.checkpoint.writer import Tensor, make_header
from pipeload.quantiser.tensor import bytes_of
from pipeload.weights.arena import DTYPE_CODES

if TYPE_CHECKING:
    from pipeload.quantiser.resumable_shards import Output

GRADIENTS_FILE: Final = "pipeload-gradients.bin"
"""It goes as soon as it is known which form each Linear gets."""
_SUMS, _GRADIENT, _DONE = "sums.", "gradient", "done"


class KeptGradients:
    """Sums of squared gradients, in the folder that is made."""

    def __init__(self, output: Output) -> None:
        """Read what is there; begin with nothing where that is nothing, or damaged."""
        self.output = output
        self.by_path: dict[str, torch.Tensor] = {}
        """fp32 of [rows] by the path of a Linear."""
        self.gradient = torch.empty(0)
        """The loss's gradient at what the next block gives; empty before the last block."""
        self._of: list[int] = []
        self.blocks_done = 0
        """Blocks that were gone back through, those of all windows together."""
        self._read()

    @property
    def blocks(self) -> int:
        """How many will be in the end."""
        if not self._of:
            return 0
        windows, batch, blocks, _ = self._of
        return -(-windows // batch) * blocks

    @property
    def whole(self) -> bool:
        """Whether all of the text is in it."""
        return 0 < self.blocks == self.blocks_done

    def begin(self, windows: int, batch: int, blocks: int, dtype: torch.dtype) -> None:
        """Forget what came of other parts of the text, or of passes in another dtype.

        Args:
            windows: of the text.
            batch: of them that go through the model at once.
            blocks: of the model.
            dtype: of hidden states.
        """
        if self._of != (mine := [windows, batch, blocks, [*DTYPE_CODES].index(dtype)]):
            self.by_path, self.gradient, self.blocks_done = {}, torch.empty(0), 0
            self._of = mine

    def write(self, gradient: torch.Tensor) -> None:
        """Keep the sums: one more block is in them, and `gradient` is for the next one.

        Raises:
            OptionError: the disk is full, or cannot be written to.
        """
        self.blocks_done += 1
        last = self.blocks_done % self._of[2] == 0
        named = {f"{_SUMS}{path}": sums for path, sums in self.by_path.items()} | {
            _GRADIENT: torch.empty(0) if last else gradient.contiguous(),
            _DONE: torch.tensor([self.blocks_done, *self._of]),
        }
        header = make_header(
            Tensor(name, DTYPE_CODES[one.dtype], tuple(one.shape), one.nbytes)
            for name, one in named.items()
        )
        self.output.write_bytes(GRADIENTS_FILE, [header, *map(bytes_of, named.values())])

    def _read(self) -> None:
        try:
            found = load((self.output.folder / GRADIENTS_FILE).read_bytes())
        except (OSError, SafetensorError):
            return
        self.blocks_done, *self._of = found.pop(_DONE).tolist()
        self.gradient = found.pop(_GRADIENT)
        self.by_path = {name.removeprefix(_SUMS): sums for name, sums in found.items()}
