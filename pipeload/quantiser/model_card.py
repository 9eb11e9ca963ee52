"""The README.md of a quantised checkpoint, and what of it stayed floats."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple, Protocol

from pipeload._sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Container, Mapping, Sequence


_KINDS_NAMED = 4
_LEAST_NAMED = 0.005  # of all weights


class Floats:
    """The weights that were not quantised, layers taken together."""

    def __init__(self, counts: Mapping[str, int], *, without: Container[str]) -> None:
        """Names of all stored tensors and how many numbers each has; `without` those quantised."""
        total = sum(counts.values())
        kinds: Counter[str] = Counter()
        for name, count in counts.items():
            if name not in without:
                kinds[re.sub(r"(?<=\.)\d+(?=\.)", "N", name)] += count
        self.share = sum(kinds.values()) / total
        """Of all weights."""
        self._kinds = [(kind, count / total) for kind, count in kinds.most_common()]

    def described(self) -> str:
        """As "21% of the weights (model.embed_tokens.weight 21%)"."""
        named = [(kind, share) for kind, share in self._kinds if share >= _LEAST_NAMED]
        shown = [f"{kind} {share:.0%}" for kind, share in named[:_KINDS_NAMED]]
        if len(named) > _KINDS_NAMED:
            shown.append("...")
        return f"{self.share:.0%} of the weights" + (f" ({', '.join(shown)})" if shown else "")


class Described(Protocol):
    """How a checkpoint is quantised, for people."""

    @property
    def name(self) -> str:
        """Name the form, as in "int8"."""

    @property
    def loaded_by(self) -> str:
        """Name the library's method that loads it."""

    @property
    def description(self) -> str:
        """Say it in a line."""

    @property
    def order(self) -> str | None:
        """Name the order that int4 rows are stored in."""


class Making(NamedTuple):
    """How a checkpoint was made, for its card."""

    form: Described
    """How it is quantised."""
    command: str
    """That made it."""
    kept_paths: Sequence[str]
    """Of Linears that are floats."""
    rows: Mapping[str, str]
    """More of the table, by what stands in front."""
    about: str
    """What else is to be said, in sentences."""
    floats: Floats
    """All that is."""
    before: int
    """Bytes of the source's tensors."""


def write(making: Making, *, source: str, from_hub: bool, name: str, after: int) -> str:
    """Write the text of the card.

    Args:
        making: how the checkpoint was made.
        source: hub id of the source, or only the name of its folder: a card should not say where on
            somebody's machine that is.
        from_hub: whether it is a hub id.
        name: of the checkpoint.
        after: its bytes.
    """
    form, before = making.form, making.before
    kept = ", ".join(f"`{path}`" for path in making.kept_paths[:8]) or "none"
    rows = {**making.rows, "Order of int4 rows": form.order} if form.order else making.rows
    more = "".join(f"\n| {name} | {value} |" for name, value in rows.items())
    ours = form.loaded_by == "pipeload"
    first = "registers the format" if ours else "pip install 'pipeload[bitsandbytes]'"
    base = f"base_model: {source}\n" if from_hub else ""
    return f"""---
library_name: transformers
{base}tags:
- pipeload
- {form.name}
---

# {name}

A quantised copy of `{source}`, made by `pipeload {making.command}`.

| | |
|---|---|
| Method | {form.description} |
| Weights | {format_size(after)}, before {format_size(before)} ({after / before:.0%}) |
| Linears kept as floats | {kept} |
| Kept as floats | {making.floats.described()} |{more}

{making.about}

```python
import pipeload  # {first}

model = pipeload.from_pretrained("{name}", memory_limit="2GB")
# or, all of it in memory:
# model = transformers.AutoModelForCausalLM.from_pretrained("{name}")
```
"""
