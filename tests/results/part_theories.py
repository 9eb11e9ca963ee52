"""What is said to make models smaller or their reading cheaper, tried on SmolLM2-135M.

Each row has a figure and a verdict that follows from it by the rule that stands beside it in code.
The package's weights were stored in 4 bits: where that matters they are spread over their steps.
"""

from __future__ import annotations

import functools
import time
import zlib
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeload.demo.model import make_smollm2
from tests.results import frame

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from tests.results.frame import Given, Row

TOKENS = 512
NF4_BLOCK = 64
EXPERTS, ROUTED = 64, 8
STEP_SHARE = 1 / 15
"""Of a group's range: how far apart the values of 4 bits are."""
SLOW_DISK = 300e6
"""Bytes per second of the disk that a lossless store would be for."""
WORTH = 2
"""What a store would have to give, as int8 does."""
THEORIES: list[Callable[[Any, torch.Tensor], Row]] = []


def run(given: Given) -> None:
    """Measure all; weights and text are the same every time."""
    folder = make_smollm2(given.folder / "smollm2")
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    model: Any = AutoModelForCausalLM.from_pretrained(folder, **options)
    text = (frame.ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8")
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor([tokenizer(text)["input_ids"][:TOKENS]])
    rows: list[Row] = []
    with torch.no_grad():
        for theory in THEORIES:
            rows.append(theory(model, ids))
            frame.tell(f"  {rows[-1]['theory']}: {rows[-1]['value']}")
    frame.save("theories", given, rows, "of no account", rounds=1)
    rounds = max(3, given.rounds)
    more = {"rounds": rounds, "disk": SLOW_DISK, "worth": WORTH}
    frame.save("theories-lossless", given.anew(), lossless(model, rounds), "of no account", **more)


def _theory(measure: Callable[[Any, torch.Tensor], Row]) -> Callable[[Any, torch.Tensor], Row]:
    THEORIES.append(measure)
    return measure


def _matrices(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for name, weight in model.named_parameters():
        if ".layers." in name and weight.dim() == 2:
            yield name, weight


@functools.cache
def _run(model: Any, text: tuple[int, ...]) -> Any:
    return model(torch.tensor([text]), output_hidden_states=True, output_attentions=True)


def _ran(model: Any, ids: torch.Tensor) -> Any:
    return _run(model, tuple(ids[0].tolist()))


@_theory
def singular_values(model: Any, _ids: torch.Tensor) -> Row:
    """A low rank would have to hold 99 % of the energy in less than half of the numbers."""
    shares, stored = [], []
    for _, weight in _matrices(model):
        energy = torch.linalg.svdvals(weight) ** 2
        rank = int((energy.cumsum(0) < 0.99 * energy.sum()).sum()) + 1
        shares.append(rank / min(weight.shape))
        stored.append(rank * sum(weight.shape) / weight.numel())
    small = float(np.median(stored)) < 0.5
    return {
        "theory": "weights are of low rank",
        "figure": "rank that holds 99 % of the energy, of the full one; numbers it takes, of all",
        "value": f"{np.median(shares):.0%}; {np.median(stored):.0%}",
        "verdict": _says(small, "they are", "they are not: the factors are no smaller"),
    }


@_theory
def adjacent_layers(model: Any, _ids: torch.Tensor) -> Row:
    """Coding a layer by what it differs from the one before pays if that is smaller than it."""
    before: dict[str, torch.Tensor] = {}
    cosines, norms = [], []
    for name, weight in _matrices(model):
        kind = name.split(".", 3)[3]
        if kind in before:
            cosines.append(float(torch.cosine_similarity(weight.flatten(), before[kind], 0)))
            norms.append(float((weight.flatten() - before[kind]).norm() / weight.norm()))
        before[kind] = weight.flatten()
    small = float(np.median(norms)) < 0.9
    return {
        "theory": "a layer is like the one before",
        "figure": "cosine of the same matrix in adjacent layers; their difference, of its norm",
        "value": f"{np.median(cosines):.3f}; {np.median(norms):.2f}",
        "verdict": _says(small, "worth coding", "nothing to code: differences are larger"),
    }


def _entropy(codes: NDArray[Any]) -> float:
    """Bits for each symbol."""
    share = np.unique(codes, return_counts=True)[1] / codes.size
    return float(-(share * np.log2(share)).sum())


def spread(weight: torch.Tensor) -> torch.Tensor:
    """Each value somewhere within its step of 4 bits, as before it was rounded to that."""
    groups = weight.reshape(-1, 32)
    step = (groups.amax(1, keepdim=True) - groups.amin(1, keepdim=True)) * STEP_SHARE
    generator = torch.Generator().manual_seed(0)
    return (groups + (torch.rand(groups.shape, generator=generator) - 0.5) * step).view_as(weight)


def _planes(model: Any) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """High and low bytes of all matrices in bf16."""
    bits = torch.cat([spread(w).bfloat16().flatten() for _, w in _matrices(model)])
    both = bits.view(torch.uint8).numpy().reshape(-1, 2)
    return np.ascontiguousarray(both[:, 1]), np.ascontiguousarray(both[:, 0])


@_theory
def entropy_of_floats(model: Any, _ids: torch.Tensor) -> Row:
    """What a perfect coder of single bytes would leave of bf16."""
    high, low = (_entropy(plane) for plane in _planes(model))
    return {
        "theory": "bf16 can be stored in fewer bits, without loss",
        "figure": "entropy of the byte with the exponent, and of the other; all that is left",
        "value": f"{high:.2f} and {low:.2f} bits; {(high + low) / 16:.0%}",
        "verdict": _says((high + low) / 16 < 0.9, "yes, by a third at most: see below", "no"),
    }


@_theory
def entropy_of_codes(model: Any, _ids: torch.Tensor) -> Row:
    """The same of NF4, whose levels were chosen to be used alike."""
    from bitsandbytes.functional import get_4bit_type

    levels = get_4bit_type("nf4", device="cpu")  # type: ignore[no-untyped-call]
    edges = (levels[1:] + levels[:-1]) / 2
    values = torch.cat([spread(weight).reshape(-1, NF4_BLOCK) for _, weight in _matrices(model)])
    codes = torch.bucketize(values / values.abs().amax(1, keepdim=True), edges)
    bits = _entropy(codes.numpy())
    return {
        "theory": "NF4 can be stored in fewer bits, without loss",
        "figure": "entropy of a code of 4 bits; what is left",
        "value": f"{bits:.2f} bits; {bits / 4:.0%}",
        "verdict": _says(bits / 4 < 0.9, "yes", "no: its codes are used nearly alike"),
    }


@_theory
def sparse_attention(model: Any, ids: torch.Tensor) -> Row:
    """Attention reads the cache alone, which is small beside weights at such lengths."""
    needed = []
    for layer in _ran(model, ids).attentions:
        last = layer[0, :, TOKENS // 2 :].flatten(0, 1).sort(descending=True).values
        needed.append(float(((last.cumsum(1) < 0.95).sum(1) + 1).float().mean()) / TOKENS)
    config = model.config
    width = config.num_key_value_heads * config.hidden_size // config.num_attention_heads
    cache = 2 * 2 * config.num_hidden_layers * width * TOKENS
    weights = 2 * sum(weight.numel() for _, weight in _matrices(model))
    return {
        "theory": "attention is sparse, so most of it need not be read",
        "figure": "positions with 95 % of the attention; the cache's bytes, of the weights'",
        "value": f"{np.mean(needed):.0%} of {TOKENS}; {cache / weights:.0%}",
        "verdict": _says(cache > weights, "worth it", "sparse, but weights are what is read"),
    }


@_theory
def early_exit(model: Any, ids: torch.Tensor) -> Row:
    """A token could stop at a layer whose guess is the last one's, if that could be told there."""
    states = _ran(model, ids).hidden_states
    final = _ran(model, ids).logits[0].argmax(-1)
    norm, head = model.model.norm, model.lm_head
    agreed = [
        float((head(norm(states[int(len(states) * part)][0])).argmax(-1) == final).float().mean())
        for part in (0.5, 0.75, 0.9)
    ]
    grown = states[-2].norm(dim=-1).median() / states[1].norm(dim=-1).median()
    return {
        "theory": "the last layers can be left out for most tokens",
        "figure": "same word as the end at 50, 75, 90 % of the layers; growth of the norm",
        "value": f"{agreed[0]:.0%}, {agreed[1]:.0%}, {agreed[2]:.0%}; {grown:.0f} times",
        "verdict": _says(agreed[1] > 0.95, "yes", "no: other words, and outputs must be equal"),
    }


@_theory
def next_routing(model: Any, ids: torch.Tensor) -> Row:
    """On a mixture that is made: this model, with a random router of 64 experts in each layer."""
    seen: list[torch.Tensor] = []
    hooks = [
        layer.post_attention_layernorm.register_forward_hook(
            lambda _module, _inputs, out: seen.append(out[0])
        )
        for layer in model.model.layers
    ]
    model(ids)
    for hook in hooks:
        hook.remove()
    generator = torch.Generator().manual_seed(0)
    recalls = []
    for here, there in pairwise(seen):
        router = torch.randn(EXPERTS, here.shape[1], generator=generator)
        wanted, guessed = ((state @ router.T).topk(ROUTED).indices for state in (there, here))
        hits = (wanted[:, :, None] == guessed[:, None, :]).any(2)
        recalls.append(float(hits.float().mean()))
    recall = float(np.median(recalls))
    return {
        "theory": "a layer's state tells the next layer's experts",
        "figure": f"of {ROUTED} of {EXPERTS} experts, how many are right (by chance "
        f"{ROUTED / EXPERTS:.0%}); tokens with all right",
        "value": f"{recall:.0%}; {recall**ROUTED:.0%} if each were by itself",
        "verdict": _says(recall > 0.9, "worth reading ahead", "too few: a pass waits for the rest"),
    }


def lossless(model: Any, rounds: int) -> Sequence[Row]:
    """Byte planes by Huffman's codes (zlib's): what is left, how fast it comes back, what for."""
    high, low = _planes(model)
    coder = zlib.compressobj(6, zlib.DEFLATED, -15, 9, zlib.Z_HUFFMAN_ONLY)
    packed = coder.compress(high.tobytes()) + coder.flush()
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        zlib.decompress(packed, -15, high.size)
        seconds.append(time.perf_counter() - began)
    left = (len(packed) + low.size) / (high.size + low.size)
    rate = (high.size + low.size) / sorted(seconds)[len(seconds) // 2]
    binding = rate * left
    gain = min(1 / left, rate / SLOW_DISK)
    core = SLOW_DISK / left / rate
    return [
        {
            "theory": "a lossless store of bf16",
            "figure": "what is left; one core decodes, in weights; disks it keeps up with",
            "value": f"{left:.0%}; {rate / 1e6:.0f} MB/s; up to {binding / 1e6:.0f} MB/s",
            "verdict": _says(binding > SLOW_DISK, "keeps up with 300 MB/s", "too slow already"),
        },
        {
            "theory": "what it would give a disk of 300 MB/s",
            "figure": "times as fast; of one core's time while it reads",
            "value": f"{gain:.2f}; {min(1, core):.0%}",
            "verdict": _says(
                gain > WORTH, "build it", "not built: int8 gives 2 and int4 3.6, at rest"
            ),
        },
    ]


def _says(true: bool, yes: str, no: str) -> str:
    return yes if true else no
