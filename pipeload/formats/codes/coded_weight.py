"""What other programs store of a quantised Linear: integers, and what they stand for.

A `CodesFormat` knows how a method lays them out, and finds them in a checkpoint: `CodedWeight`s. Of
one of those, `Codes` are its integers a few rows at a time, and a `Grid` says which numbers they
are: `convert` makes a checkpoint of our own kernels out of both, code for code. Nothing here looks
at a model.
"""

from __future__ import annotations

import abc
import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import torch

from pipeload.errors import CheckpointError, UnsupportedModelError
from pipeload.weights.arena import DTYPE_CODES, DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pipeload.checkpoint.headers import TensorEntry

FLOATS: Final = (torch.float16, torch.bfloat16, torch.float32)
"""Dtypes that scales may have."""
GROUP_OF: Final = "group_of"
"""What the group of each column is called among the parts of a weight."""
MIDDLE: Final = {4: 8, 8: 128}
"""The code that stands for zero where a method is symmetric, by bits."""


def held_in(bits: int) -> int:
    """In how many bits our kernels have codes of so many: all of the fewer are there as well."""
    return 4 if bits <= 4 else 8


def moved_up(bits: int) -> int:
    """By how much codes of so many bits are moved up, for their middle to be that of our kernels.

    Counted from there, the zero of a group is small, and rounds little.
    """
    return MIDDLE[held_in(bits)] - (1 << bits - 1)


class Numbers(abc.ABC):
    """Which numbers the codes of a weight stand for."""

    @abc.abstractmethod
    def numbers(self, codes: torch.Tensor, first: int) -> torch.Tensor:
        """Make fp32 of [rows, columns] of codes as `Codes.rows` gives, the first of row `first`."""


@dataclass(frozen=True)
class Grid(Numbers):
    """Evenly spread ones, for our kernels. Groups are of neighbouring columns."""

    scale: torch.Tensor
    """fp32 of [groups, rows]."""
    start: torch.Tensor
    """fp32 of [groups, rows]: from where codes are counted, as a subclass says."""
    middle: int
    """The code that our kernels count from."""

    @abc.abstractmethod
    def scales_and_zeros(self, dtype: torch.dtype) -> torch.Tensor:
        """[groups, rows, 2]: the scale, and the number that the middle code stands for."""

    def _by_group(
        self, codes: torch.Tensor, first: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Codes in fp32, [rows, groups, columns], with scale and start of [rows, groups, 1]."""
        scale, start = (
            each[:, first : first + len(codes)].t()[..., None] for each in (self.scale, self.start)
        )
        # A copy in any case, and in order: it is changed in place.
        made = torch.empty(codes.shape, dtype=torch.float32).copy_(codes)
        return made.unflatten(1, (len(self.scale), -1)), scale, start


class ZeroCodes(Grid):
    """(code - start) * scale."""

    @property
    def is_symmetric(self) -> bool:
        """Whether 0 is in the middle everywhere."""
        return bool((self.start == self.middle).all())

    def numbers(self, codes: torch.Tensor, first: int) -> torch.Tensor:
        """Make fp32 of codes of [rows, columns], of which the first is row `first`."""
        made, scale, zero = self._by_group(codes, first)
        return made.sub_(zero).mul_(scale).flatten(1)

    def scales_and_zeros(self, dtype: torch.dtype) -> torch.Tensor:
        """[groups, rows, 2], rounded as gptqmodel does for torch's kernel: each factor first."""
        scale = self.scale.to(dtype)
        return torch.stack((scale, (self.middle - self.start.to(dtype)) * scale), -1)


@dataclass(frozen=True)
class Offsets(Grid):
    """(Codes - up) * scale + start."""

    up: int = 0
    """By how much codes were moved up, as `moved_up` says."""

    def numbers(self, codes: torch.Tensor, first: int) -> torch.Tensor:
        """Make fp32 of codes of [rows, columns], of which the first is row `first`."""
        made, scale, offset = self._by_group(codes, first)
        return made.sub_(self.up).mul_(scale).add_(offset).flatten(1)

    def scales_and_zeros(self, dtype: torch.dtype) -> torch.Tensor:
        """[groups, rows, 2]: the scale, and what the middle code stands for, rounded once."""
        zero = self.start + (self.middle - self.up) * self.scale
        return torch.stack((self.scale, zero), -1).to(dtype)


class Lay(enum.Enum):
    """What codes of a weight lie in a word, the lowest bits first."""

    DOWN = enum.auto()
    """Of neighbouring columns in one row; words of [columns, rows]."""
    ALONG = enum.auto()
    """The same; words of [rows, columns]."""
    ACROSS = enum.auto()
    """Of neighbouring rows in one column, 4 bits each; words of [columns, rows]."""


class Words(NamedTuple):
    """The integers of a weight as they are stored."""

    lay: Lay
    words: torch.Tensor
    bits: int
    """Of a code: fewer than 4 lie one behind the other, in as many words as they fill."""
    places: tuple[int, ...] = ()
    """Which code of a word is that of its first row, and so on, where it has several rows'."""
    signed: bool = False
    """Whether they are values from -8 to 7, of 4 bits, and not codes from 0 on."""


class Codes(NamedTuple):
    """The integers of a weight."""

    rows: Callable[[int, int], torch.Tensor]
    """uint8 of [rows, columns], from one row to before another; multiples of 8, or the last. Where
    they are no grid's, as these are numbered."""
    grid: Numbers
    columns: torch.Tensor | None = None
    """Which input each of these columns is multiplied by: int32 of [columns]. None if in order."""
    stored: Words | None = None
    """What `rows` makes them of, where it is words."""


@dataclass(frozen=True)
class CodedWeight:
    """One quantised weight of a checkpoint."""

    name: str
    """Of the weight that it stands for."""
    shape: tuple[int, int]
    """[rows, columns] of that."""
    bits: int
    """Of a code, for our kernels: 4 or 8; 0 where they are no grid's, and no kernel takes them."""
    groups: int
    """In a row."""
    parts: Mapping[str, TensorEntry]
    """What is stored of it, by what the method calls it; codes first."""
    decode: Callable[[Mapping[str, torch.Tensor]], Codes]
    """Makes codes of the tensors of all parts. Raises CheckpointError for what cannot be."""

    @property
    def group_of(self) -> TensorEntry | None:
        """The group of each column, where that is stored."""
        return self.parts.get(GROUP_OF)

    def grid(self, read: Callable[[TensorEntry], torch.Tensor]) -> Numbers:
        """Which numbers its codes stand for; those are not read.

        Raises:
            CheckpointError: what is stored cannot be.
        """
        (codes, entry), *others = self.parts.items()
        tensors = {key: read(one) for key, one in others}
        tensors[codes] = torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device="meta")
        return self.decode(tensors).grid

    @property
    def nbytes(self) -> int:
        """Bytes that are stored of it."""
        return sum(entry.nbytes for entry in self.parts.values())


class CodesFormat(Protocol):
    """A method of quantising whose integers our kernels take."""

    method: str
    """What config.json calls it, and converted checkpoints too."""
    title: str
    """For people."""

    def find(
        self, config: Mapping[str, Any], stored: Mapping[str, TensorEntry]
    ) -> list[CodedWeight]:
        """Find all coded weights.

        Args:
            config: its `quantization_config`.
            stored: tensors of the checkpoint by name.

        Raises:
            UnsupportedModelError: a setting is not understood, or cannot be expressed.
            CheckpointError: tensors do not fit each other.
        """


def statistics(weight: CodedWeight, grid: Numbers, groups: int, dtype: torch.dtype) -> torch.Tensor:
    """What our kernels take beside codes: [groups, rows, 2] of 4 bits, [rows, 1] of 8.

    Args:
        weight: whose they are.
        grid: its numbers.
        groups: in a row, a multiple of those stored; 0 of 8 bits, which are symmetric.
        dtype: of scales and zeros.
    """
    assert isinstance(grid, Grid)  # noqa: S101 - others become floats
    both = grid.scales_and_zeros(dtype)
    if weight.bits == 4:
        return both.repeat_interleave(groups // weight.groups, 0)
    return both[0, :, :1]


def not_taken_over(method: str, why: str) -> UnsupportedModelError:
    """The error for integers of a method that cannot be taken over."""
    return UnsupportedModelError(
        f"integers of {method!r} cannot be taken over: {why}. Use the float checkpoint, or one in "
        "another packing."
    )


def stems(stored: Mapping[str, TensorEntry], suffix: str) -> list[str]:
    """What stands before `.suffix` in names, in order."""
    return sorted(name.removesuffix(suffix) for name in stored if name.endswith(f".{suffix}"))


def part(
    stored: Mapping[str, TensorEntry],
    name: str,
    shape: tuple[int | None, ...],
    *dtypes: torch.dtype,
) -> TensorEntry:
    """The stored tensor `name`, of one of these dtypes and that shape; None is any length.

    Raises:
        CheckpointError: it is missing, or another.
    """
    entry = stored.get(name)
    allowed = " or ".join(DTYPE_CODES[dtype] for dtype in dtypes)
    lengths = ["any" if length is None else str(length) for length in shape]
    wanted = f"{allowed} of [{', '.join(lengths)}]"
    if entry is None:
        raise CheckpointError(
            f"the checkpoint has no tensor {name!r}, wanted {wanted}. Download it again."
        )
    fits = len(entry.shape) == len(shape) and all(
        length in {None, found} for length, found in zip(shape, entry.shape, strict=True)
    )
    if not fits or DTYPES.get(entry.dtype) not in dtypes:
        raise CheckpointError(
            f"tensor {name!r} in {str(entry.file)!r} is {entry.dtype} of {list(entry.shape)}, "
            f"wanted {wanted}. Download the checkpoint again; if it is whole, it is packed in a "
            "way that pipeload does not know."
        )
    return entry


def group_columns(name: str, columns: int, groups: int) -> int:
    """How many columns each group has.

    Raises:
        CheckpointError: not all have as many.
    """
    if groups < 1 or columns % groups:
        raise CheckpointError(
            f"the {columns} columns of {name!r} are no whole number of {groups} groups. Download "
            "the checkpoint again."
        )
    return columns // groups


def columns_by_group(name: str, group_of: torch.Tensor, groups: int) -> torch.Tensor | None:
    """The order of columns in which groups are side by side; None if they are so already.

    Args:
        name: of the weight.
        group_of: the group of each column, integers of [columns].
        groups: how many there are.

    Raises:
        CheckpointError: groups are not of one size.
    """
    if bool((group_of < 0).all()):  # said of none
        return None
    group_of = group_of.to(torch.int64)
    size = group_columns(name, len(group_of), groups)
    least, most = int(group_of.min()), int(group_of.max())
    if least < 0 or most >= groups or bool((group_of.bincount(minlength=groups) != size).any()):
        raise CheckpointError(
            f"the groups of columns of {name!r} are not {groups} of {size} each, which is the only "
            "way that is understood. Use the float checkpoint."
        )
    if bool((group_of.diff() >= 0).all()):
        return None
    return group_of.argsort(stable=True).to(torch.int32)
