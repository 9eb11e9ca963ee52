#!/usr/bin/env python3
"""What has to hold on a card. Each check is a function; `test_card.py` gives them to pytest.

    python tests/gpu/checks.py [NAME ...]

Needs torch and transformers, no pytest and no network. Prints one line for each check; the status
is the number of those that failed.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import logging
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "hooks"))

import torch

from tests.gpu.card import IDS, REHEARSED, Card, find_card
from tests.make_llama import LlamaShape

# About 120 MB in bf16: large enough for segments of the allocator, small enough to be made at once.
SMALL = LlamaShape(768, 2048, 8, 12, 4, vocab=4096, dtype="bf16")
TINY = LlamaShape(256, 640, 6, 8, 4, vocab=512, dtype="bf16")
SHAPE = TINY if REHEARSED else SMALL
SHARES = (0.0, 0.3, 0.7, 1.1)
"""Of the way from the smallest limit to the one with which everything fits."""

Check = Callable[[Card], None]
CHECKS: dict[str, Check] = {}


def check(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


def _logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(ids.to(model.device)).logits
    return result


def _generate(model: Any, ids: torch.Tensor = IDS, **options: Any) -> list[list[int]]:
    torch.manual_seed(7)
    ids = ids.to(model.device)
    given = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0} | options
    given.setdefault("attention_mask", torch.ones_like(ids))
    tokens: list[list[int]] = model.generate(ids, **given).tolist()
    return tokens


def _at(card: Card, folder: Path, share: float, **options: Any) -> Any:
    least, whole = card.limits(folder, **options)
    return card.stream(folder, least + int(share * (whole - least)), **options)


def _assert_equal(got: torch.Tensor, wanted: torch.Tensor) -> None:
    assert got.device == wanted.device
    assert not wanted.isnan().any(), "the reference is NaN"
    assert torch.equal(got, wanted), f"differs by {(got - wanted).abs().max().item()}"


@check
def same_logits_and_tokens(card: Card) -> None:
    """At four limits, in three dtypes: equal to the plain model on the card."""
    for dtype in ("bf16", "fp16", "fp32"):
        folder = card.checkpoint(dtype, _with_dtype(dtype))
        plain = card.plain(folder)
        wanted, tokens = _logits(plain, IDS), _generate(plain)
        del plain
        for share in SHARES:
            model = _at(card, folder, share)
            for _ in range(3):
                _assert_equal(_logits(model, IDS), wanted)
            assert _generate(model) == tokens
            assert model.pipeload.plan.fits is (share > 1) or share == 0.7
            del model
            card.forget()


def _with_dtype(dtype: str) -> LlamaShape:
    from dataclasses import replace

    return replace(SHAPE, dtype=dtype)


@check
def same_perplexity(card: Card) -> None:
    """The loss of every token is the plain model's on the card; scoring stays within the limit."""
    from pipeload._pass_needs import PassNeeds
    from pipeload._perplexity import measure, tokens_to_hint
    from pipeload._windows import slide

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
        model = _at(card, folder, share, tokens=tokens, batch=2)
        card.forget()
        _assert_equal(losses(model, model.pipeload), wanted)
        assert card.peak() <= model.pipeload.plan.memory_limit
        del model
    card.forget()


@check
def same_without_room_in_host_memory(card: Card) -> None:
    """Every block comes from disk each time."""
    folder = card.checkpoint("bf16", SHAPE)
    plain = card.plain(folder)
    wanted, tokens = _logits(plain, IDS), _generate(plain)
    del plain
    with _nothing_hosted():
        model = _at(card, folder, 0.2)
        for _ in range(3):
            _assert_equal(_logits(model, IDS), wanted)
        assert _generate(model) == tokens
        plan = model.pipeload.plan
        assert plan.hosted_bytes == 0
        assert plan.bytes_per_pass > 0


@contextlib.contextmanager
def _nothing_hosted() -> Iterator[None]:
    """As if the host had no room: models here are small."""
    with (
        mock.patch("pipeload._device_plan.choose_hosted", return_value=frozenset()),
        mock.patch("pipeload._device_governor.choose_hosted", return_value=frozenset()),
    ):
        yield


def _scarce(card: Card, folder: Path, share: float, **options: Any) -> Any:
    """At the smallest limit of the host that works."""
    import pipeload

    least, whole = card.limits(folder, **options)
    limit = least + int(share * (whole - least))
    for _ in range(3):  # the process grows a little between a plan and the next
        try:
            pipeload.plan(
                folder, memory_limit=limit, device=card.name, host_memory_limit=1, dtype="auto"
            )
        except pipeload.MemoryLimitError as error:
            host = error.smallest_limit + (8 << 20)
        try:
            return card.stream(folder, limit, host_memory_limit=host, **options)
        except pipeload.MemoryLimitError as error:
            print("   again:", error)
    raise AssertionError("no limit of the host works")


@check
def generation_modes(card: Card) -> None:
    """Batches with padding, beams, sampling, prompt lookup, assisted, static cache."""
    folder = card.checkpoint("bf16", SHAPE)
    plain, model = card.plain(folder), _at(card, folder, 0.4, batch=4)
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
        wanted = _generate(plain, ids, disable_compile=True, **options)
        assert _generate(model, ids, **options) == wanted, options


@check
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
    wanted, tokens = _logits(plain, ids), _generate(plain, ids)
    for share in (0.0, 0.5, 1.1):
        model = _at(card, folder, share)
        _assert_equal(_logits(model, ids), wanted)
        assert _generate(model, ids) == tokens
        del model
        card.forget()


@check
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
        wanted, tokens = _logits(plain, IDS), _generate(plain)
        del plain
        for share in (0.0, 0.5, 1.1):
            model = _at(card, folder, share)
            _assert_equal(_logits(model, IDS), wanted)
            assert _generate(model) == tokens
            plan = model.pipeload.plan
            assert plan.link_bytes_per_pass < 0.6 * _block_bytes(SHAPE), plan.table()
            del model
            card.forget()


def _block_bytes(shape: LlamaShape) -> int:
    """Of all blocks as floats of two bytes."""
    head = shape.hidden // shape.heads
    attention = 2 * shape.hidden * (shape.heads + shape.kv_heads) * head
    return 2 * shape.layers * (attention + 3 * shape.hidden * shape.intermediate)


@check
def every_block_has_its_own_weights(card: Card) -> None:
    """Looked at on the card, by a kernel behind each block's own, while the copies run ahead."""
    folder = card.checkpoint("bf16", SHAPE)
    plain = card.plain(folder)
    wanted = [_sums(block) for block in plain.model.layers]
    del plain
    for room in (contextlib.nullcontext(), _nothing_hosted()):
        with room:
            model = _at(card, folder, 0.0)
            seen: list[torch.Tensor] = []

            def look(module: Any, *_args: object, seen: list[torch.Tensor] = seen) -> None:
                seen.append(_sums(module))

            for block in model.model.layers:
                block.register_forward_hook(look, prepend=True)
            for _ in range(4):
                seen.clear()
                _logits(model, IDS)
                for index, (got, sums) in enumerate(zip(seen, wanted, strict=True)):
                    assert torch.equal(got, sums), f"block {index} computed with other weights"
            del model, block
            card.forget()


def _sums(block: Any) -> torch.Tensor:
    """A number for each weight, from its bits; computed on its device, and not waited for."""
    with torch.no_grad():
        sums = [p.detach().view(torch.int16).to(torch.int64).sum() for p in block.parameters()]
        return torch.stack(sums)


@check
def slow_kernels(card: Card) -> None:
    """The processor is far ahead of the card: a buffer waits for the computing with it."""
    folder = card.checkpoint("bf16", SHAPE)
    plain = card.plain(folder)
    wanted = _logits(plain, IDS)
    del plain
    # Before the model: its limit is the whole device's.
    side = torch.ones((512 if REHEARSED else 4096,) * 2, device=card.where, dtype=torch.bfloat16)
    product = torch.empty_like(side)
    model = _at(card, folder, 0.0)

    def slow(*_args: object) -> None:
        for _ in range(2 if REHEARSED else 40):
            torch.mm(side, side, out=product)

    for block in model.model.layers:
        block.self_attn.register_forward_pre_hook(slow)
    for _ in range(3):
        _assert_equal(_logits(model, IDS), wanted)


@check
def limits_hold(card: Card) -> None:
    """The allocator's peak stays under the device's limit, this process's under the host's."""
    from pipeload._memory import rss_bytes

    folder = card.checkpoint("bf16", SHAPE)
    for share in (0.0, 0.5):
        card.forget()
        model = _scarce(card, folder, share)
        most, ended = [0], threading.Event()

        def look(most: list[int] = most, ended: threading.Event = ended) -> None:
            while not ended.wait(0.005):
                most[0] = max(most[0], rss_bytes())

        watcher = threading.Thread(target=look)
        watcher.start()
        for _ in range(2):
            _generate(model, max_new_tokens=40)
        ended.set()
        watcher.join()
        plan = model.pipeload.plan
        assert card.peak() <= plan.memory_limit, (card.peak(), plan.table())
        assert most[0] <= plan.host_memory_limit, (most[0], plan.table())
        if not REHEARSED:
            assert model.pipeload.stats().locked, "staging is not locked in its place"
        del model
    card.forget()


@check
def another_limit(card: Card) -> None:
    """Smaller and larger while it is there; within each."""
    folder = card.checkpoint("bf16", SHAPE)
    plain = card.plain(folder)
    wanted = _logits(plain, IDS)
    del plain
    least, whole = card.limits(folder)
    model = card.stream(folder, whole)
    for share in (1.0, 0.2, 0.6, 0.0, 1.0, 1.0):
        model.pipeload.set_memory_limit(least + int(share * (whole - least)))
        _assert_equal(_logits(model, IDS), wanted)
        card.forget()
        _assert_equal(_logits(model, IDS), wanted)
        assert card.peak() <= model.pipeload.plan.memory_limit, (
            share,
            card.peak(),
            card.reserved(),
            model.pipeload.plan.table(),
        )


@check
def a_pass_that_died(card: Card) -> None:
    """By an interrupt, an error, and no memory on the card: the next one is right."""
    folder = card.checkpoint("bf16", SHAPE)
    plain = card.plain(folder)
    wanted, tokens = _logits(plain, IDS), _generate(plain)
    del plain
    model = _at(card, folder, 0.3)
    errors: list[type[BaseException]] = [KeyboardInterrupt, RuntimeError, torch.OutOfMemoryError]
    for error in errors:

        def die(*_args: object, error: type[BaseException] = error) -> None:
            raise error("died")

        hook = model.model.layers[len(model.model.layers) // 2].mlp.register_forward_hook(die)
        try:
            _logits(model, IDS)
        except error:
            pass
        else:
            raise AssertionError("it did not die")
        hook.remove()
        _assert_equal(_logits(model, IDS), wanted)
        assert _generate(model) == tokens


@check
def what_fits_has_no_hooks(card: Card) -> None:
    """After one pass nothing is read or copied, and no memory is locked."""
    folder = card.checkpoint("bf16", SHAPE)
    model = _at(card, folder, 1.1)
    _logits(model, IDS)
    before = model.pipeload.stats()
    _generate(model)
    after = model.pipeload.stats()
    assert (after.bytes_read, after.copied_bytes) == (before.bytes_read, before.copied_bytes)
    hooks = [h for m in model.modules() for h in (*m._forward_pre_hooks, *m._forward_hooks)]
    assert len(hooks) == 1, hooks


@check
def removal(card: Card) -> None:
    """The plain model, on the card."""
    folder = card.checkpoint("bf16", SHAPE)
    plain = card.plain(folder)
    wanted, tokens = _logits(plain, IDS), _generate(plain)
    del plain
    model = _at(card, folder, 0.8, tokens=2048)
    _logits(model, IDS)
    model.pipeload.set_memory_limit("90%")
    model.pipeload.remove()
    _assert_equal(_logits(model, IDS), wanted)
    assert _generate(model) == tokens


@check
def nothing_is_left(card: Card) -> None:
    """Time and again a model: the card holds no more after the last than after the first."""
    folder = card.checkpoint("bf16", SHAPE)
    held = []
    for _ in range(3 if REHEARSED else 8):
        model = _at(card, folder, 0.4)
        _generate(model, max_new_tokens=3)
        del model
        gc.collect()
        card.forget()
        held.append(card.reserved())
    assert held[-1] <= held[0] + (4 << 20), held


@check
def another_stream(card: Card) -> None:
    """The user's own stream: buffers are ordered by what runs there."""
    if card.fake is not None:
        return
    folder = card.checkpoint("bf16", SHAPE)
    plain = card.plain(folder)
    wanted = _logits(plain, IDS)
    model = _at(card, folder, 0.0)
    stream = torch.Stream(device=card.where)
    with stream:
        outputs = [_logits(model, IDS) for _ in range(3)]
    stream.synchronize()
    for output in outputs:
        _assert_equal(output, wanted)


def main(names: list[str]) -> int:
    """Run all, or those that are named."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # that it casts, at each product
    with tempfile.TemporaryDirectory() as scratch:
        card = find_card(Path(scratch))
        if card is None:
            print("no accelerator here (torch.accelerator.is_available()): nothing was checked")
            return 0
        failed = 0
        for name, function in CHECKS.items():
            if names and name not in names:
                continue
            started = time.perf_counter()
            try:
                function(card)
            except Exception:
                failed += 1
                traceback.print_exc(file=sys.stdout)
                print(f"FAILED {name} ({time.perf_counter() - started:.1f} s)", flush=True)
            else:
                print(f"ok     {name} ({time.perf_counter() - started:.1f} s)", flush=True)
            card.forget()
        return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
