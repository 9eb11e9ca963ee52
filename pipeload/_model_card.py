"""The README.md of a quantised checkpoint."""

from __future__ import annotations

from typing import Protocol

from pipeload._sizes import format_size


class Config(Protocol):
    """What is said of it."""

    bits: int
    group_size: int | None
    method: str
    order: str | None
    modules_to_not_convert: list[str]


def write(*, source: str, name: str, config: Config, before: int, after: int) -> str:
    """The text.

    Args:
        source: folder or hub id of the float checkpoint.
        name: of the quantised one.
        config: how it was quantised.
        before: bytes of the float tensors.
        after: bytes of the quantised checkpoint.
    """
    if config.bits == 8:
        how = "int8, symmetric, one scale for each row, rounded to nearest"
    else:
        zeros = "zero points optimised without data (half-quadratic)"
        rounded = "rounded to nearest" if config.method == "rtn" else zeros
        how = f"int4, asymmetric, groups of {config.group_size}, {rounded}"
    kept = ", ".join(f"`{path}`" for path in config.modules_to_not_convert[:8]) or "none"
    order = f"\n| Order of int4 rows | {config.order} |" if config.order else ""
    # Hub ids only: a card should not name folders of somebody's machine.
    base = f"base_model: {source}\n" if _is_hub_id(source) else ""
    shown = source if _is_hub_id(source) else source.replace("\\", "/").rstrip("/").split("/")[-1]
    return f"""---
library_name: transformers
{base}tags:
- pipeload
- int{config.bits}
---

# {name}

A quantised copy of `{shown}`, made by `pipeload quantize`.

| | |
|---|---|
| Method | {how} |
| Weights | {format_size(after)}, before {format_size(before)} ({after / before:.0%}) |
| Linears kept as floats | {kept} |{order}

Embeddings and the output head are kept as floats. No data was used.

```python
import pipeload  # registers the format

model = pipeload.from_pretrained("{name}", memory_limit="2GB")
# or, all of it in memory:
# model = transformers.AutoModelForCausalLM.from_pretrained("{name}")
```
"""


def _is_hub_id(source: str) -> bool:
    return source.count("/") == 1 and not source.startswith(("/", ".", "~"))
