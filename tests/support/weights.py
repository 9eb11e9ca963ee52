"""Made-up weights for the tests of layouts and plans: any sizes, at any places, of any kind."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hypothesis import strategies as st

from pipeload.budget.residency import UnitSpec
from pipeload.checkpoint.headers import TensorEntry
from pipeload.weights.cast_rows import CastRows
from pipeload.weights.layout import Weight

if TYPE_CHECKING:
    from collections.abc import Sequence

FILES = (Path("a.safetensors"), Path("b.safetensors"))


class Writer:
    """Lays tensors into files one behind the other, as a checkpoint does."""

    def __init__(self) -> None:
        self._ends = dict.fromkeys(FILES, 1234)

    def entry(
        self, name: str, dtype: str, items: int, *, gap: int = 0, file: Path = FILES[0]
    ) -> TensorEntry:
        start = self._ends[file] + gap
        stop = start + items * (4 if dtype == "F32" else 2)
        self._ends[file] = stop
        return TensorEntry(name, file, dtype, (items,), start, stop)

    def weight(
        self, name: str, items: int, *, kind: str = "raw", gap: int = 0, file: Path = FILES[0]
    ) -> list[Weight]:
        """In bf16. "cast" is stored in fp32; "split" gives two weights made out of one tensor,
        "joined" one weight made out of two; "packed" is one in fp32 that is stored in bf16, and
        unpacked row by row."""
        if kind == "packed":
            entry = replace(self.entry(name, "BF16", items, gap=gap, file=file), shape=(items, 1))
            repacked = CastRows("BF16", 2)
            return [Weight(name, "F32", (items, 1), 4 * items, (entry,), repacked=repacked)]
        if kind == "split":
            source = self.entry(name, "BF16", 2 * items, gap=gap, file=file)
            return [made(f"{name}.{half}", items, (source,), f"{name}.0") for half in range(2)]
        if kind == "joined":
            half = max(1, items // 2)
            sources = [self.entry(f"{name}.{i}", "BF16", half, gap=gap, file=file) for i in (0, 1)]
            return [made(name, 2 * half, tuple(sources), name)]
        dtype = "F32" if kind == "cast" else "BF16"
        return [made(name, items, (self.entry(name, dtype, items, gap=gap, file=file),), None)]


def made(name: str, items: int, sources: tuple[TensorEntry, ...], group: str | None) -> Weight:
    return Weight(name, "BF16", (items,), 2 * items, sources, group)


SIZES = st.one_of(st.integers(1, 300_000), st.sampled_from([1, 2048, 2049, 40_960, 250_000]))
GAPS = st.sampled_from([0, 0, 0, 2, 64, 4096, 16_384, 65_536, 65_538])
KINDS = ("raw", "raw", "raw", "cast", "split", "joined")


@st.composite
def weight_lists(
    draw: st.DrawFn, *, kinds: Sequence[str] = KINDS, max_size: int = 8
) -> list[Weight]:
    """A list of weights, in any order."""
    writer = Writer()
    found: list[Weight] = []
    for number in range(draw(st.integers(0, max_size))):
        kind, file = draw(st.sampled_from(kinds)), draw(st.sampled_from(FILES))
        found += writer.weight(f"w{number}", draw(SIZES), kind=kind, gap=draw(GAPS), file=file)
    return draw(st.permutations(found))


@st.composite
def unit_lists(draw: st.DrawFn, *, kinds: Sequence[str] = KINDS) -> list[UnitSpec]:
    """Blocks: mostly alike, as in a model, or each of its own kind."""
    writer = Writer()
    shapes = draw(
        st.lists(
            st.lists(st.tuples(SIZES, st.sampled_from(kinds), GAPS), min_size=1, max_size=14),
            min_size=1,
            max_size=3,
        )
    )
    units = []
    for number in range(draw(st.integers(1, 8))):
        weights: list[Weight] = []
        for place, (items, kind, gap) in enumerate(draw(st.sampled_from(shapes))):
            name = f"{number}.{place}"
            weights += writer.weight(name, items, kind=kind, gap=gap, file=FILES[number % 2])
        units.append(UnitSpec(f"block.{number}", tuple(weights)))
    return units
