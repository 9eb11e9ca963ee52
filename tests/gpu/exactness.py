"""Streamed to a card, a model computes what the plain one computes there: bit for bit."""

from __future__ import annotations

import contextlib
import importlib.util
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from tests.gpu.card import IDS, REHEARSED
from tests.gpu.comparisons import SHAPE, TINY, assert_equal, generate, logits, stream_at

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.gpu.card import Card
    from tests.tools.make_llama import LlamaShape

SHARES = (0.0, 0.3, 0.7, 1.1)
"""Of the way from the smallest limit to the one with which everything fits."""


def same_logits_and_tokens(card: Card) -> None:
    """At four limits, in three dtypes: equal to the plain model on the card."""
    for dtype in ("bf16", "fp16", "fp32"):
        folder = card.checkpoint(dtype, _with_dtype(dtype))
        plain = card.plain(folder)
        wanted, tokens = logits(plain, IDS), generate(plain)
        del plain
        for share in SHARES:
            model = stream_at(card, folder, share)
            for _ in range(3):
                assert_equal(logits(model, IDS), wanted)
            assert generate(model) == tokens
            assert model.pipeload.plan.fits is (share > 1) or share == 0.7
            del model
            card.forget()


def _with_dtype(dtype: str) -> LlamaShape:
    return replace(SHAPE, dtype=dtype)


def same_perplexity(card: Card) -> None:
    """The loss of every token is the plain model's on the card; scoring stays within the limit."""
    from pipeload.budget.pass_needs import PassNeeds
    from pipeload.evaluate.perplexity import measure, tokens_to_hint
    from pipeload.evaluate.text_windows import slide

    folder = card.checkpoint("bf16", SHAPE)
    ids = torch.randint(SHAPE.vocab, (1000,), generator=torch.Generator().manual_seed(3))
    windows = slide(len(ids), window=256, stride=128)

    def losses(model: Any, handle: Any) -> torch.Tensor:
        found = measure(model, handle, ids, windows, batch=2, pass_begins=lambda *_: None)
        assert found.tokens == len(ids) - 1
        return found.nats[found.scored]

    plain = card.plain(folder)
    wanted = losses(plain, None)
    needs = PassNeeds(plain, plain.config)
    tokens = tokens_to_hint(needs, type(plain).forward, windows, 2)
    del plain
    for share in (0.0, 0.5, 1.1):
        card.forget()
        model = stream_at(card, folder, share, tokens=tokens, batch=2)
        card.forget()
        assert_equal(losses(model, model.pipeload), wanted)
        assert card.peak() <= model.pipeload.plan.memory_limit
        del model
    card.forget()


def same_without_room_in_host_memory(card: Card) -> None:
    """Every block comes from disk each time."""
    folder = card.checkpoint("bf16", SHAPE)
    plain = card.plain(folder)
    wanted, tokens = logits(plain, IDS), generate(plain)
    del plain
    with _nothing_hosted():
        model = stream_at(card, folder, 0.2)
        for _ in range(3):
            assert_equal(logits(model, IDS), wanted)
        assert generate(model) == tokens
        plan = model.pipeload.plan
        assert plan.hosted_bytes == 0
        assert plan.bytes_per_pass > 0


@contextlib.contextmanager
def _nothing_hosted() -> Iterator[None]:
    """As if the host had no room: models here are small."""
    with mock.patch("pipeload.devices.host_tier.choose_hosted", return_value=frozenset()):
        yield


def generation_modes(card: Card) -> None:
    """Batches with padding, beams, sampling, prompt lookup, assisted, static cache."""
    folder = card.checkpoint("bf16", SHAPE)
    plain, model = card.plain(folder), stream_at(card, folder, 0.4, batch=4)
    draft = card.plain(
        card.checkpoint("draft", TINY.__class__(128, 256, 2, 4, 2, vocab=SHAPE.vocab))
    )
    rows = torch.randint(3, SHAPE.vocab, (3, 20), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(rows)
    mask[0, :6], mask[1, :2] = 0, 0
    mask = mask.to(card.where)
    modes: list[tuple[torch.Tensor, dict[str, Any]]] = [
        (rows, {"attention_mask": mask}),
        (rows, {"num_beams": 3}),
        (rows, {"do_sample": True, "top_k": 30}),
        (rows[:1], {"prompt_lookup_num_tokens": 3}),
        (rows[:1], {"assistant_model": draft}),
        (rows, {"cache_implementation": "static"}),
    ]
    for ids, options in modes:
        # Compiled, the plain model would compute otherwise; one that streams is never compiled.
        wanted = generate(plain, ids, disable_compile=True, **options)
        assert generate(model, ids, **options) == wanted, options


def experts(card: Card) -> None:
    """A mixture of experts, whose decode the library switches on a card; made on the way."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = card.scratch / "mixtral"
    if not folder.exists():
        config = AutoConfig.for_model(
            "mixtral",
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=4,
            num_local_experts=4,
            vocab_size=512,
        )
        torch.manual_seed(3)
        AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    ids = IDS % 500
    plain = card.plain(folder)
    wanted, tokens = logits(plain, ids), generate(plain, ids)
    for share in (0.0, 0.5, 1.1):
        model = stream_at(card, folder, share)
        assert_equal(logits(model, ids), wanted)
        assert generate(model, ids) == tokens
        del model
        card.forget()


def bitsandbytes_weights(card: Card) -> None:
    """NF4 and LLM.int8, quantised on the card by the library: packed over the link, equal."""
    if card.fake is not None or not all(
        map(importlib.util.find_spec, ("bitsandbytes", "accelerate"))
    ):
        print("   left out: it needs bitsandbytes and accelerate")
        return
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    floats = card.checkpoint("bf16", SHAPE)
    forms: dict[str, dict[str, Any]] = {
        "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        "int8": {"load_in_8bit": True},
    }
    for name, options in forms.items():
        config = BitsAndBytesConfig(**options, bnb_4bit_compute_dtype=torch.bfloat16)
        made = AutoModelForCausalLM.from_pretrained(
            floats, dtype="auto", quantization_config=config, device_map={"": card.where}
        )
        folder = card.scratch / name
        made.save_pretrained(folder)
        del made
        plain = AutoModelForCausalLM.from_pretrained(
            folder, dtype="auto", device_map={"": card.where}
        )
        wanted, tokens = logits(plain, IDS), generate(plain)
        del plain
        for share in (0.0, 0.5, 1.1):
            model = stream_at(card, folder, share)
            assert_equal(logits(model, IDS), wanted)
            assert generate(model) == tokens
            plan = model.pipeload.plan
            assert plan.link_bytes_per_pass < 0.6 * _block_bytes(SHAPE), plan.table()
            del model
            card.forget()


def _block_bytes(shape: LlamaShape) -> int:
    """Of all blocks as floats of two bytes."""
    head = shape.hidden // shape.heads
    attention = 2 * shape.hidden * (shape.heads + shape.kv_heads) * head
    return 2 * shape.layers * (attention + 3 * shape.hidden * shape.intermediate)


def every_block_has_its_own_weights(card: Card) -> None:
    """Looked at on the card, by a kernel behind each block's own, while the copies run ahead."""
    folder = card.checkpoint("bf16", SHAPE)
    plain = card.plain(folder)
    wanted = [_sums(block) for block in plain.model.layers]
    del plain
    for room in (contextlib.nullcontext(), _nothing_hosted()):
        with room:
            model = stream_at(card, folder, 0.0)
            seen: list[torch.Tensor] = []

            def look(module: Any, *_args: object, seen: list[torch.Tensor] = seen) -> None:
                seen.append(_sums(module))

            for block in model.model.layers:
                block.register_forward_hook(look, prepend=True)
            for _ in range(4):
                seen.clear()
                logits(model, IDS)
                for index, (got, sums) in enumerate(zip(seen, wanted, strict=True)):
                    assert torch.equal(got, sums), f"block {index} computed with other weights"
            del model, block
            card.forget()


def _sums(block: Any) -> torch.Tensor:
    """A number for each weight, from its bits; computed on its device, and not waited for."""
    with torch.no_grad():
        sums = [p.detach().view(torch.int16).to(torch.int64).sum() for p in block.parameters()]
        return torch.stack(sums)


def slow_kernels(card: Card) -> None:
    """The processor is far ahead of the card: a buffer waits for the computing with it."""
    folder = card.checkpoint("bf16", SHAPE)
    plain = card.plain(folder)
    wanted = logits(plain, IDS)
    del plain
    # Before the model: its limit is the whole device's.
    side = torch.ones((512 if REHEARSED else 4096,) * 2, device=card.where, dtype=torch.bfloat16)
    product = torch.empty_like(side)
    model = stream_at(card, folder, 0.0)

    def slow(*_args: object) -> None:
        for _ in range(2 if REHEARSED else 40):
            torch.mm(side, side, out=product)

    for block in model.model.layers:
        block.self_attn.register_forward_pre_hook(slow)
    for _ in range(3):
        assert_equal(logits(model, IDS), wanted)


def another_stream(card: Card) -> None:
    """The user's own stream: buffers are ordered by what runs there."""
    if card.fake is not None:
        return
    folder = card.checkpoint("bf16", SHAPE)
    plain = card.plain(folder)
    wanted = logits(plain, IDS)
    model = stream_at(card, folder, 0.0)
    stream = torch.Stream(device=card.where)
    with stream:
        outputs = [logits(model, IDS) for _ in range(3)]
    stream.synchronize()
    for output in outputs:
        assert_equal(output, wanted)
