"""Quantises one stored tensor as bitsandbytes does, in pieces of rows: what it saves, bit for bit.

Statistics are made when all pieces are through: double quantisation takes the mean of all of them.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from pipeload.checkpoint.writer import Tensor
from pipeload.errors import OptionError
from pipeload.quantiser.resumable_shards import Step
from pipeload.quantiser.tensor import bytes_of, read_weight
from pipeload.weights.arena import DTYPE_CODES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pipeload.checkpoint.headers import TensorEntry
    from pipeload.quantiser.tensor import Reading

KINDS = ("nf4", "fp4")
BLOCK = 64
"""Weights that share a scale: neighbours in a row."""
_NESTED_BLOCK = 256
_OFFSET_ROOM = 32  # characters: its digits are known last; JSON may end in spaces


class FourBits(NamedTuple):
    """How one weight is quantised."""

    kind: str
    double: bool
    """Whether the statistics are quantised, too."""
    dtype: torch.dtype
    """That the weight is quantised from, and multiplied as."""


def require() -> None:
    """Refuse to go on without bitsandbytes.

    Raises:
        OptionError: it is not installed.
    """
    try:
        import bitsandbytes  # noqa: F401
    except ImportError as error:
        raise OptionError(
            "nf4 and fp4 are made by bitsandbytes, which cannot be imported "
            f"({error}): pip install 'pipeload[bitsandbytes]'. int8 and int4 do not need it."
        ) from error


def quantised(entry: TensorEntry, how: FourBits, reading: Reading) -> Step:
    """A weight of [rows, columns] as 4-bit values, and what goes with it."""
    items = math.prod(entry.shape)
    blocks = items // BLOCK
    # Sizes that depend on the values are none but the count of blocks.
    shapes = {"absmax": (blocks,), "nested_absmax": (-(-blocks // _NESTED_BLOCK),)}
    packed = Tensor(entry.name, "U8", (items // 2, 1), items // 2)
    tensors = [packed]
    for name, made in _statistics(torch.zeros(1), entry.shape, how).items():
        shape = shapes.get(name, tuple(made.shape))
        nbytes = math.prod(shape) * made.element_size()
        tensors.append(Tensor(f"{entry.name}.{name}", DTYPE_CODES[made.dtype], shape, nbytes))
    return Step(tuple(tensors), partial(_pieces, entry, how, reading))


def _pieces(entry: TensorEntry, how: FourBits, reading: Reading) -> Iterator[memoryview]:
    from bitsandbytes.functional import quantize_4bit

    found: list[torch.Tensor] = []
    for weight in read_weight(entry, reading):
        packed, state = quantize_4bit(weight.to(how.dtype), quant_type=how.kind)
        found.append(state.absmax)
        yield bytes_of(packed)
    for made in _statistics(torch.cat(found), entry.shape, how).values():
        yield bytes_of(made)


def _statistics(
    absmax: torch.Tensor, shape: tuple[int, ...], how: FourBits
) -> dict[str, torch.Tensor]:
    """What the library saves beside a weight, from the largest magnitudes of all its blocks."""
    import bitsandbytes

    library: Any = bitsandbytes.functional  # without types

    nested: dict[str, Any] = {}
    if how.double:
        offset = absmax.mean()
        absmax, state = library.quantize_blockwise(absmax - offset, blocksize=_NESTED_BLOCK)
        nested = {"offset": offset, "state2": state}
    state = library.QuantState(
        absmax=absmax,
        shape=torch.Size(shape),
        code=library.get_4bit_type(how.kind, device="cpu"),
        blocksize=BLOCK,
        quant_type=how.kind,
        dtype=how.dtype,
        **nested,
    )
    made: dict[str, torch.Tensor] = state.as_dict(packed=True)
    if how.double:
        name = f"quant_state.bitsandbytes__{how.kind}"
        text = bytes(made[name].tolist())
        digits = len(str(nested["offset"].item()))
        spaces = b" " * (_OFFSET_ROOM - digits)
        made[name] = torch.tensor([*text, *spaces], dtype=torch.uint8)
    return made
