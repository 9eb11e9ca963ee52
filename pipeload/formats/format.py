"""What a format of quantised weights is: the seam that each has a file or folder of its own behind.

A `Format` knows a method of config.json: what of it is streamed, and which weights of a model it
has packed. A `PackedWeight` knows one of those: what of it is stored and read, in which order, how
its module shows it, and what computing with it takes. Where the library itself makes floats of what
is stored, there is no packed weight, and the format says what that takes: `Unpacking`.

Formats are found in `registry`. A new one is a file or a folder here, and a line there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from pipeload.errors import UnsupportedModelError
from pipeload.formats.form_names import INT8

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import torch
    from torch import nn

    from pipeload.checkpoint.headers import TensorEntry
    from pipeload.weights.layout import Weight
    from pipeload_hooks import Companion

AS_STORED = "read as it is stored; same kernels as plain"
PUT_IN_ORDER = "read as it is stored, and put into the order of pipeload's kernels"
AS_FLOATS = "unpacked to floats by transformers' own operation each time it is read"


class Stored(Protocol):
    """A model on the meta device, and what its checkpoint holds for it, by the library's rules."""

    @property
    def model(self) -> nn.Module:
        """The model, with the modules that the library computes with."""

    @property
    def where(self) -> torch.device | str:
        """The device that will compute."""

    @property
    def folder(self) -> str:
        """Where the checkpoint is, for people."""

    def plain(self, name: str) -> Weight | None:
        """The parameter `name`, read as it is stored and cast; None if that cannot be.

        There must be such a parameter.
        """

    def dtype(self, name: str) -> torch.dtype:
        """What the parameter `name` is in once it is loaded."""

    def parts(self, name: str) -> Mapping[str, TensorEntry]:
        """The stored tensors that belong to the parameter `name`, by what the library calls them.

        One that comes alone goes by the last part of its name.
        """

    def reader(self) -> Callable[[TensorEntry], torch.Tensor]:
        """What reads single stored tensors, whole. It raises ReadError, and keeps no model."""


class Held(Protocol):
    """What a product holds beside its tensors at one moment. Numbers alone, and hashable."""

    def of(self, rows: int) -> int:
        """Bytes, with so many rows of input."""


class Shown(NamedTuple):
    """What a module shows a packed weight with; nothing of the weight is there yet."""

    parameter: nn.Parameter
    companions: list[Companion]
    activate: Callable[[], Callable[[], None]]
    """To be called when the library has finished the model: its state dict would undo it.

    Returns what is to be called at removal.
    """


class PackedWeight(Protocol):
    """One quantised weight of a model."""

    @property
    def weight(self) -> Weight:
        """What is streamed of it: which bytes, and how they are put into order as they are read."""

    @property
    def counts(self) -> Mapping[str, int]:
        """How many numbers of the model its parameters stand for, by their names."""

    @property
    def couples_rows(self) -> bool:
        """Whether inputs that are multiplied at once change each other's products."""

    def statistics_bytes(self, takes: Callable[[int], int]) -> int:
        """Bytes that stay in memory for it and are no parameter; `takes` says it of a tensor."""

    def held_by_products(self, dtype: torch.dtype) -> Iterable[Held]:
        """What a product takes beside its tensors, at several moments; `dtype`: its input's."""

    def show(self) -> Shown | None:
        """Build what its module computes with; None where that is a parameter like any other.

        Raises:
            ReadError: statistics could not be read.
        """

    def leave_to_streaming(self) -> None:
        """Have the library, which loads the rest of the model, take it for loaded already."""


class Faster(NamedTuple):
    """Unpacks as the library does, in less time and with next to no memory beside."""

    can: Callable[[torch.dtype], bool]
    """Whether it makes floats of that dtype here."""
    fill: Callable[[Mapping[str, torch.Tensor], torch.Tensor], bool]
    """Fills a tensor out of what is stored, by its pattern; False for values it does not know."""


class Unpacking(NamedTuple):
    """How the library makes floats of what is stored, each time it is read."""

    times: int
    """Memory that it takes to unpack a weight, in multiples of the weight; measured."""
    by_rows: bool = False
    """Whether rows of a weight can be unpacked by themselves, from the same rows of what is stored.
    """
    config: str | None = None
    """The library's configuration whose `dequantize` makes float weights of the stored ones, where
    it may also keep them packed for a kernel: that is not streamed."""
    packed_on_cpu: bool = False
    """Whether the library computes with packed ones on the CPU as well, to other last bits."""
    faster: Faster | None = None
    """What does the same as the library's operation, to the last bit and in less time."""


class Format(Protocol):
    """A method whose checkpoints are streamed, to the last bit as a plain load on the CPU.

    What has a value or a body here is so for most: a format inherits, and says what differs.
    """

    method: str
    """`quant_method` in config.json."""
    how: str
    """What becomes of what is read, for people."""
    only: tuple[str, str] | None = None
    """A setting of config.json and the one value with which it is streamed."""
    unpacking: Unpacking | None = None
    """How floats are made of it; None where weights stay packed."""
    on_devices: bool = False
    """Whether it is streamed to accelerators, too."""
    package: str | None = None
    """The package that computes with it, None for torch or ours."""
    mapping: Sequence[Any] = ()
    """The library's converters for names of stored tensors that it has no rule for."""

    def matches(self, config: Any) -> bool:
        """Whether a `quantization_config` is of this method: a table, or the library's object."""
        return named(config) == self.method

    def find(self, stored: Stored) -> Mapping[str, PackedWeight]:
        """Find the packed weights of a model, by their names.

        Raises:
            CheckpointError: one is missing, malformed or of another weight.
            ReadError: one could not be read.
        """

    def tensors(
        self, _stored: Stored, _entries: Iterable[TensorEntry], /
    ) -> Mapping[str, torch.Tensor] | None:
        """Read stored tensors that are not streamed, by name; None where the library can.

        Raises:
            ReadError: one could not be read.
        """
        return None

    def keep_inputs_exact(self, _model: nn.Module, /) -> bool:
        """Have inputs never rounded; whether they might have been. The model is on meta."""
        return False

    def kernel(self, _model: nn.Module, /) -> str | None:
        """Say what multiplies its weights here, where there is more than one way."""
        return None

    def nearest_form(self, _config: Any, /) -> str:
        """Name what `pipeload quantize` makes that is nearest to it, as options are typed."""
        return INT8


def setting(config: Any, name: str, otherwise: Any = None) -> Any:
    """Look up a setting of a `quantization_config`: a table, or the library's object."""
    if isinstance(config, dict):
        return config.get(name, otherwise)
    return getattr(config, name, otherwise)


def named(config: Any) -> str:
    """The method that a `quantization_config` names."""
    method = setting(config, "quant_method")
    return str(getattr(method, "value", method))


def refusal(method: str, why: str, instead: str, where: str = "") -> UnsupportedModelError:
    """The error for checkpoints of a method that cannot be streamed; `where`: as in "here"."""
    place = f" {where}" if where else ""
    return UnsupportedModelError(
        f"checkpoints quantised by {method!r} cannot be streamed{place}: {why}. {instead}"
    )
