#!/usr/bin/env python3
"""Print what each form of `pipeload quantize` costs: sizes and perplexities of a real model.

    python -m tests.tools.perplexity_table [--tokens 4096] [--shuffled] [--only TEXT]
        [--text FILE] [--errors FOLDER]

The model is SmolLM2-135M-Instruct as the tests have it. The text is the language reference that
comes with every Python, `pydoc_data.topics`: its wording differs a little between versions. Each
token is scored once, in windows of 1024.

The weights of that SmolLM2 come from a 4-bit file (groups of 32), so 4 bits may lose less of them
than of others. Hence `--shuffled`: the same function, its channels in another order, so that no
group is one of the file's. What is calibrated reads the text that comes with pipeload, which is no
part of the one that is measured. And hence `--errors`: an encoder that never was in 4 bits, a
folder that `AutoModel` loads. Its last hidden states are compared with those of its floats. Its
Linears are rounded from bf16 as a checkpoint of it would be, and multiplied as fp32: the errors are
those of rounding.

Status 1 if int8 is more than 0.5 % from bf16.
"""

from __future__ import annotations

import argparse
import json
import math
import pydoc_data.topics
import shutil
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import safe_open
from transformers import AutoModel, AutoTokenizer

import pipeload
from pipeload.formats.integers.compensation import Factor, blocks_of, factor
from pipeload.formats.integers.rounding import from_int4, to_int4, to_int8, weigh_columns
from pipeload.quantiser.calibration_text import find_text
from tests.support.models import smollm2
from tests.support.shuffled import save_shuffled

if TYPE_CHECKING:
    from collections.abc import Callable

FORMS: dict[str, dict[str, Any]] = {
    "int8": {"method": "int8"},
    **{
        f"int4, groups of {group}, {zero_points}": {
            "method": "int4",
            "group_size": group,
            "zero_points": zero_points,
        }
        for group in (32, 64, 128)
        for zero_points in ("rtn", "hqq", "search")
    },
    **{
        f"int4, groups of {group}, calibrated": {
            "method": "int4",
            "group_size": group,
            "calibrate": "builtin",
        }
        for group in (32, 64, 128)
    },
    **{
        f"int4, groups of {group}, gptq": {
            "method": "int4",
            "group_size": group,
            "calibrate": "builtin",
            "gptq": True,
        }
        for group in (32, 64, 128)
    },
    # About what groups of 32 take, and halfway from groups of 64 to that.
    **{f"int4, {size}": {"method": "int4", "size": size} for size in ("123.2MB", "119.8MB")},
    "nf4": {"method": "nf4"},
    "nf4, double": {"method": "nf4", "double_quant": True},
    "fp4": {"method": "fp4"},
}
WINDOW = 1024
NEAR = 0.005


def main() -> int:
    """Run as a script."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--tokens", type=int, default=4 * WINDOW)
    parser.add_argument("--shuffled", action="store_true", help="the model with its channels so")
    parser.add_argument("--text", type=Path, help="a file to be measured instead")
    parser.add_argument("--only", default="", help="forms whose names hold this")
    parser.add_argument("--errors", type=Path, help="folder of an encoder that was never in 4 bits")
    options = parser.parse_args()
    source = smollm2("bf16")
    with tempfile.TemporaryDirectory() as folder:
        if options.shuffled:
            source = save_shuffled(source, Path(folder) / "shuffled", seed=3)
        text = options.text
        if text is None:
            text = Path(folder) / "reference.txt"
            text.write_text(reference(), encoding="utf-8")
        bf16 = evaluated(source, text, options.tokens)
        print("| | bytes a weight | of the quantised ones | perplexity | to bf16 | made in |")
        print("|---|--:|--:|--:|--:|--:|")
        print(line("bf16", bf16, bf16, 2.0, None), flush=True)
        for name, form in FORMS.items():
            if options.only not in name or form.get("group_size") == 128:  # 576 columns
                continue
            began = time.perf_counter()
            made = pipeload.quantize(source, Path(folder) / name, **form)
            seconds = time.perf_counter() - began
            found = evaluated(made, text, options.tokens)
            print(line(name, found, bf16, quantised_bytes(source, made), seconds), flush=True)
            shutil.rmtree(made)
            ratio = found["perplexity"] / bf16["perplexity"]
            if name == "int8" and abs(ratio - 1) > NEAR:
                print(f"int8 is {ratio - 1:.2%} from bf16", file=sys.stderr)
                return 1
    if options.errors is not None:
        print_errors(options.errors)
    return 0


def reference() -> str:
    """The text: sections in the order of their names, without what they are marked up with."""
    topics = pydoc_data.topics.topics
    return "\n\n".join(topics[name].replace("**", "").replace('"', "") for name in sorted(topics))


def evaluated(folder: Path, text: Path, tokens: int) -> dict[str, Any]:
    """What `pipeload eval` finds of one model."""
    sizes = ["--window", WINDOW, "--stride", WINDOW, "--max-tokens", tokens]
    arguments = ["eval", folder, "--text", text, *sizes, "--memory-limit", "4GB", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "pipeload", *map(str, arguments)],
        stdout=subprocess.PIPE,
        check=True,
    )
    figures: dict[str, Any] = json.loads(done.stdout)["models"][0]
    return figures


def line(
    name: str, found: dict[str, Any], bf16: dict[str, Any], each: float, seconds: float | None
) -> str:
    ratio = found["perplexity"] / bf16["perplexity"] - 1
    cells = [
        name,
        f"{found['bytes_per_weight']:.3f}",
        f"{each:.3f}",
        f"{found['perplexity']:.3f}",
        "" if seconds is None else f"{ratio:+.2%}",
        "" if seconds is None else f"{seconds:.0f} s",
    ]
    return f"| {' | '.join(cells)} |"


def quantised_bytes(source: Path, made: Path) -> float:
    """Bytes for each weight that was quantised, with all that goes with it."""
    before, after = stored(source), stored(made)
    kept = {name for name, tensor in before.items() if after.get(name) == tensor}
    items = sum(math.prod(before[name][1]) for name in before.keys() - kept)
    nbytes = sum(tensor[2] for name, tensor in after.items() if name not in kept)
    return nbytes / items


def stored(folder: Path) -> dict[str, tuple[str, tuple[int, ...], int]]:
    """dtype, shape and bytes of every tensor of a checkpoint."""
    found = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - no dict
                tensor = opened.get_tensor(name)
                found[name] = str(tensor.dtype), tuple(tensor.shape), tensor.nbytes
    return found


# -- a model that never was in 4 bits --------------------------------------------------------------


@torch.no_grad()
def print_errors(folder: Path) -> None:
    """Relative errors (L2) of the last hidden states, over windows of the same text."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    text = reference()[:40_000]
    ids = tokenizer(text, return_tensors="pt", verbose=False).input_ids[0][: 8 * 256].view(-1, 256)
    model: Any = AutoModel.from_pretrained(folder, dtype=torch.float32)
    wanted = model(ids).last_hidden_state
    linears = [m for m in model.modules() if type(m) is torch.nn.Linear]
    weights = [linear.weight.data.clone() for linear in linears]
    told = inputs_of(model, linears, tokenizer)
    print(f"\n| {type(model).__name__}, {folder.name} | error of the last hidden states |")
    print("|---|--:|")
    for name, rounded in {"bf16": lambda weight, _: weight.float(), **roundings()}.items():
        for linear, weight, one in zip(linears, weights, told, strict=True):
            linear.weight.data = rounded(weight.bfloat16(), one).view(weight.shape)
        error = (model(ids).last_hidden_state - wanted).norm() / wanted.norm()
        print(f"| {name} | {error:.4f} |", flush=True)


class Told(NamedTuple):
    """What the built-in text tells of the inputs of a Linear."""

    weighed: torch.Tensor
    factors: list[Factor]


def inputs_of(model: Any, linears: list[Any], tokenizer: Any) -> list[Told]:
    """Find it while the float model reads that."""
    text = find_text("builtin", None)
    assert text is not None
    ids = tokenizer(text.text, return_tensors="pt", verbose=False).input_ids[0]
    ids = ids[: len(ids) // 256 * 256].view(-1, 256)
    found: dict[Any, Told] = {}

    def look(module: Any, args: Any) -> None:
        rows = args[0].flatten(0, -2)
        blocks = [rows[:, block.start : block.stop] for block in blocks_of(rows.shape[1])]
        factors = [factor(some.t() @ some) for some in blocks]
        found[module] = Told(weigh_columns(rows.square().mean(0)), factors)

    hooks = [linear.register_forward_pre_hook(look) for linear in linears]
    model(ids)
    for hook in hooks:
        hook.remove()
    return [found.get(linear, Told(torch.ones(linear.in_features), [])) for linear in linears]


def roundings() -> dict[str, Callable[[torch.Tensor, Told], torch.Tensor]]:
    """What each form makes of a weight and of what is told of its inputs, as fp32."""
    made: dict[str, Callable[[torch.Tensor, Told], torch.Tensor]] = {}
    for name, form in FORMS.items():
        if form["method"] == "int8":
            made[name] = through_int8
        elif form["method"] == "int4":
            made[name] = partial(through_int4, form=form)
        else:
            made[name] = partial(
                through_4bit, kind=form["method"], double=form.get("double_quant", False)
            )
    return made


def through_int8(weight: torch.Tensor, _: Told) -> torch.Tensor:
    values, scale = to_int8(weight)
    return values.float() * scale.float()[:, None]


def through_int4(weight: torch.Tensor, told: Told, *, form: dict[str, Any]) -> torch.Tensor:
    zero_points = form.get("zero_points", "search")
    weights = told.weighed if "calibrate" in form else None
    factors = told.factors if "gptq" in form else []
    return from_int4(*to_int4(weight, form["group_size"], zero_points, weights, factors))


def through_4bit(weight: torch.Tensor, _: Told, *, kind: str, double: bool) -> torch.Tensor:
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    packed, state = quantize_4bit(weight, compress_statistics=double, quant_type=kind)
    made: torch.Tensor = dequantize_4bit(packed, state).float()
    return made


if __name__ == "__main__":
    sys.exit(main())
