"""The README.md of a quantised checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from pipeload._sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Sequence


class Form(Protocol):
    """What is said of it."""

    name: str
    loaded_by: str
    description: str
    order: str | None


def write(
    *, source: str, name: str, form: Form, kept_paths: Sequence[str], before: int, after: int
) -> str:
    """The text.

    Args:
        source: folder or hub id of the float checkpoint.
        name: of the quantised one.
        form: how it was quantised.
        kept_paths: of Linears that are floats.
        before: bytes of the float tensors.
        after: bytes of the quantised checkpoint.
    """
    kept = ", ".join(f"`{path}`" for path in kept_paths[:8]) or "none"
    order = f"\n| Order of int4 rows | {form.order} |" if form.order else ""
    ours = form.loaded_by == "pipeload"
    first = "registers the format" if ours else "pip install 'pipeload[bitsandbytes]'"
    # Hub ids only: a card should not name folders of somebody's machine.
    base = f"base_model: {source}\n" if _is_hub_id(source) else ""
    shown = source if _is_hub_id(source) else source.replace("\\", "/").rstrip("/").split("/")[-1]
    return f"""---
library_name: transformers
{base}tags:
- pipeload
- {form.name}
---

# {name}

A quantised copy of `{shown}`, made by `pipeload quantize`.

| | |
|---|---|
| Method | {form.description} |
| Weights | {format_size(after)}, before {format_size(before)} ({after / before:.0%}) |
| Linears kept as floats | {kept} |{order}

Embeddings and the output head are kept as floats. No data was used.

```python
import pipeload  # {first}

model = pipeload.from_pretrained("{name}", memory_limit="2GB")
# or, all of it in memory:
# model = transformers.AutoModelForCausalLM.from_pretrained("{name}")
```
"""


def _is_hub_id(source: str) -> bool:
    return source.count("/") == 1 and not source.startswith(("/", ".", "~"))
