"""Mixtures of experts of which only what is routed to is read: as plain, to the last bit.

Whatever was not read is NaN, so a wrong slice would show.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

import pipeload
from tests.support.experts import EXPERTS, LAYERS, ROUTED, experts_of, moe_config, save_moe
from tests.support.models import load_plain, save_random
from tests.support.streaming import (
    IDS,
    WAIT_SECONDS,
    assert_nothing_held,
    generated,
    in_thread,
    load_streamed,
    logits,
)
from tests.support.sweeps import few

if TYPE_CHECKING:
    from pathlib import Path

CACHES = (1_000, 1_000_000, 100_000_000)
"""Bytes over the smallest limit: no expert stays, some, all."""
PROMPTS = [
    torch.arange(3, 3 + batch * tokens).reshape(batch, tokens)
    for batch, tokens in ((1, 1), (1, 17), (4, 1), (3, 9))
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_moe(tmp_path_factory.mktemp("moe"))


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize(
    ("implementation", "dtype"),
    few(
        [
            ("grouped_mm", "fp32"),
            ("grouped_mm", "bf16"),
            ("batched_mm", "fp32"),
            ("eager", "fp32"),
            ("eager", "bf16"),
        ],
        [("grouped_mm", "fp32"), ("grouped_mm", "bf16"), ("batched_mm", "fp32"), ("eager", "fp32")],
    ),
)
def test_logits_and_tokens(tmp_path: Path, kind: str, dtype: str, implementation: str) -> None:
    """Prompts, batches and decoding, whatever stays in memory and however it multiplies."""
    folder = save_moe(tmp_path, kind, dtype)
    options: dict[str, Any] = {"experts_implementation": implementation}
    plain = load_plain(folder, **options)
    expected = [logits(plain, ids) for ids in PROMPTS]
    tokens = generated(plain, PROMPTS[1])
    for spare in CACHES:
        model = load_streamed(folder, spare=spare, **options)
        for _ in range(2):
            for ids, wanted in zip(PROMPTS, expected, strict=True):
                assert torch.equal(logits(model, ids), wanted), (spare, ids.shape)
        assert generated(model, PROMPTS[1]) == tokens
        stats = model.pipeload.stats()
        assert stats.expert_misses, spare
        assert (stats.expert_hits > 0) == (spare != CACHES[0])
        assert_nothing_held(model)


def test_only_what_is_routed_to_is_read(folder: Path) -> None:
    """One token reads four experts of each layer, once; the next one reads those that are new."""
    model = load_streamed(folder, spare=CACHES[-1])
    plan = model.pipeload.plan
    assert plan.experts is not None
    assert plan.experts.experts == LAYERS * EXPERTS
    logits(model, PROMPTS[0])
    first = model.pipeload.stats()
    assert (first.expert_hits, first.expert_misses) == (0, LAYERS * ROUTED)
    expert = 3 * 72 * 96 * 4
    # Pages that are shared with a neighbour are read whole, at either end of each stored tensor.
    assert expert <= first.expert_bytes_read / (LAYERS * ROUTED) <= expert + 3 * 2 * 4096
    assert first.expert_bytes == LAYERS * ROUTED * expert
    logits(model, PROMPTS[0])
    second = model.pipeload.stats()
    assert (second.expert_hits, second.expert_misses) == (LAYERS * ROUTED, LAYERS * ROUTED)
    assert second.expert_bytes_read == first.expert_bytes_read


def test_what_was_not_read_is_nan(folder: Path) -> None:
    """Also what was read and went."""
    model = load_streamed(folder, spare=CACHES[-1])
    logits(model, PROMPTS[0])
    experts = experts_of(model)
    for seat, there in zip(experts.seats, experts._there, strict=True):
        for view in seat.memory.views.values():
            absent = [expert for expert in range(EXPERTS) if expert not in there]
            # But for what shares a page with one that is there.
            assert view[absent].isnan().float().mean() > 0.9
            assert not view[sorted(there)].isnan().any()
    model.pipeload.set_memory_limit(model.pipeload.plan.smallest_limit + 50_000)
    assert all(v.isnan().all() for seat in experts.seats for v in seat.memory.views.values())


def test_ways_to_generate(folder: Path) -> None:
    plain, model = load_plain(folder), load_streamed(folder, spare=CACHES[1])
    ways: list[dict[str, Any]] = [
        {"num_beams": 3},
        {"do_sample": True, "num_return_sequences": 2},
        {"prompt_lookup_num_tokens": 3},
        {"cache_implementation": "static"},
    ]
    for way in ways:
        found = []
        for one in (plain, model):
            torch.manual_seed(1)
            options = {"do_sample": False, "max_new_tokens": 8} | way
            found.append(one.generate(IDS, **options))
        assert torch.equal(*found), way


def test_in_inference_mode(folder: Path) -> None:
    plain, model = load_plain(folder), load_streamed(folder, spare=CACHES[1])
    for _ in range(2):
        with torch.inference_mode():
            assert torch.equal(model(IDS).logits, plain(IDS).logits)


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_cast_while_it_is_read(tmp_path: Path, kind: str) -> None:
    save_moe(tmp_path, kind, "fp32")
    plain = load_plain(tmp_path, dtype=torch.float16)
    for spare in CACHES[1:]:
        model = load_streamed(tmp_path, spare=spare, dtype=torch.float16)
        assert torch.equal(logits(model), logits(plain))


def test_another_way_to_multiply_between_passes(folder: Path) -> None:
    plain, model = load_plain(folder), load_streamed(folder, spare=CACHES[1])
    for way in ("eager", "batched_mm", "grouped_mm"):
        for one in (plain, model):
            one.set_experts_implementation(way)
        assert torch.equal(logits(model), logits(plain)), way


def test_a_way_to_multiply_that_takes_all_experts(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused by name before anything runs, and the model is none the worse."""

    def of_all(module: Any, hidden: torch.Tensor, *_routing: torch.Tensor) -> torch.Tensor:
        return hidden + torch.mean(module.gate_up_proj)

    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._global_mapping, "of_all", of_all)
    model = load_streamed(folder, spare=CACHES[1])
    model.set_experts_implementation("of_all")
    with pytest.raises(pipeload.UnsupportedOperationError, match="experts implementation 'of_all'"):
        logits(model)
    model.set_experts_implementation("grouped_mm")
    assert torch.equal(logits(model), logits(load_plain(folder)))
    assert_nothing_held(model)


def test_ids_that_a_hook_has_changed(folder: Path) -> None:
    """A hook of the user's, which runs after ours, sends rows elsewhere."""
    plain, model = load_plain(folder), load_streamed(folder, spare=CACHES[1])

    def elsewhere(_module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden, ids, weights = args
        return hidden, (ids + 1) % EXPERTS, weights

    expected = logits(plain)
    for one in (plain, model):
        one.model.layers[1].mlp.experts.register_forward_pre_hook(elsewhere)
    assert not torch.equal(logits(plain), expected)
    assert torch.equal(logits(model), logits(plain))


def test_two_threads(folder: Path) -> None:
    plain, model = load_plain(folder), load_streamed(folder, spare=CACHES[1])
    expected = [generated(plain, ids) for ids in PROMPTS[:2]]
    barrier = threading.Barrier(2)

    def run(ids: torch.Tensor) -> list[list[int]]:
        barrier.wait(WAIT_SECONDS)
        return [generated(model, ids) for _ in range(3)]

    futures = [in_thread(run, ids) for ids in PROMPTS[:2]]
    for future, tokens in zip(futures, expected, strict=True):
        assert future.result(WAIT_SECONDS) == [tokens] * 3


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing")
def test_adapters_beside_experts(folder: Path) -> None:
    peft = pytest.importorskip("peft")
    found = []
    for one in (load_plain(folder), load_streamed(folder, spare=CACHES[1])):
        torch.manual_seed(0)
        config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        found.append(logits(peft.get_peft_model(one, config)))
    assert torch.equal(*found)


def test_a_wrapped_model(folder: Path) -> None:
    plain = load_plain(folder)
    expected = logits(plain), generated(plain)
    smallest = pipeload.plan(folder, memory_limit="16GB", dtype="auto").smallest_limit
    model = pipeload.wrap(plain, memory_limit=smallest + 40_000_000)
    assert model.pipeload.plan.experts is not None
    assert torch.equal(logits(model), expected[0])
    assert generated(model) == expected[1]


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_the_plain_model_comes_back(tmp_path: Path, kind: str) -> None:
    folder = save_moe(tmp_path, kind)
    expected = logits(load_plain(folder))
    model = load_streamed(folder, spare=CACHES[-1])
    logits(model, PROMPTS[0])
    model.pipeload.remove()
    assert torch.equal(logits(model), expected)
    state = load_plain(folder).state_dict()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_where_stacks_are_not_what_is_stored(tmp_path: Path) -> None:
    """Experts that the library makes of stored tensors in another way are read whole, and exact."""
    config = moe_config()
    config.num_experts = 4  # a bank of less than a megabyte
    save_random(config, tmp_path, "fp32", seed=3)
    model = load_streamed(tmp_path, spare=CACHES[1])
    assert model.pipeload.plan.experts is None
    assert torch.equal(logits(model), logits(load_plain(tmp_path)))


def _routing(model: Any, dtype: torch.dtype = torch.int64) -> tuple[Any, torch.Tensor, Any, Any]:
    """An experts module, and what it might be called with."""
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(6, 96, generator=generator)
    ids = torch.randint(0, EXPERTS, (6, ROUTED), generator=generator).to(dtype)
    weights = torch.rand(6, ROUTED, generator=generator)
    return model.model.layers[1].mlp.experts, hidden, ids, weights


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint8, torch.int32])
@torch.no_grad()
def test_ids_of_any_integers(folder: Path, dtype: torch.dtype) -> None:
    plain, model = load_plain(folder), load_streamed(folder, spare=CACHES[1])
    found = []
    for one in (plain, model):
        experts, *given = _routing(one, dtype)
        found.append(experts(*given))
    assert torch.equal(*found)


@torch.no_grad()
def test_ids_from_the_end(folder: Path) -> None:
    """As an index takes them."""
    options: dict[str, Any] = {"experts_implementation": "batched_mm"}
    found = []
    for one in (load_plain(folder, **options), load_streamed(folder, spare=1_000, **options)):
        experts, hidden, ids, weights = _routing(one)
        found.append(experts(hidden, ids - EXPERTS, weights))
    assert torch.equal(*found)
    assert not found[0].isnan().any()


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
@torch.no_grad()
def test_whatever_device_is_the_default(folder: Path, implementation: str) -> None:
    options: dict[str, Any] = {"experts_implementation": implementation}
    found = []
    for one in (load_plain(folder, **options), load_streamed(folder, spare=1_000, **options)):
        experts, *given = _routing(one)
        with torch.device("meta"):
            found.append(experts(*given))
    assert torch.equal(*found)


def test_a_loop_that_takes_both_slices_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither goes before both were used."""
    kind = type(load_plain(folder).model.layers[0].mlp.experts)
    monkeypatch.setattr(kind, "forward", _both_first)
    options: dict[str, Any] = {"experts_implementation": "eager"}
    expected = logits(load_plain(folder, **options))
    model = load_streamed(folder, spare=1_000, **options)
    assert model.pipeload.plan.experts is not None
    assert torch.equal(logits(model), expected)


def _both_first(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    out = torch.zeros_like(hidden_states)
    for expert in top_k_index.unique():
        up, down = self.gate_up_proj[expert], self.down_proj[expert]
        rows, places = torch.where(top_k_index == expert)
        gate, wide = torch.nn.functional.linear(hidden_states[rows], up).chunk(2, dim=-1)
        made = torch.nn.functional.linear(self.act_fn(gate) * wide, down)
        out.index_add_(0, rows, made * top_k_weights[rows, places, None])
    return out


@pytest.mark.parametrize(
    "take", ["module.gate_up_proj.sum()", "module.gate_up_proj[1:3].sum()"], ids=["all", "some"]
)
def test_a_module_that_takes_many_experts_at_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, take: str
) -> None:
    """Somebody's own `forward`: the operation is refused by name, not served with NaN."""
    kind = type(load_plain(folder).model.layers[0].mlp.experts)

    def forward(module: Any, hidden: torch.Tensor, *_routing: torch.Tensor) -> torch.Tensor:
        return torch.add(hidden, eval(take))

    model = load_streamed(folder, spare=1_000, experts_implementation="eager")
    with monkeypatch.context() as patch:
        patch.setattr(kind, "forward", forward)
        wanted = r"of 'model.layers.0.mlp.experts' .* takes all of '.*gate_up_proj' at once"
        with pytest.raises(pipeload.UnsupportedOperationError, match=wanted):
            logits(model)
    plain = load_plain(folder, experts_implementation="eager")
    assert torch.equal(logits(model), logits(plain))
    assert_nothing_held(model)


def test_a_call_that_is_refused_beside_a_pass(folder: Path) -> None:
    """In another thread: the layer that runs goes on."""
    model = load_streamed(folder, spare=CACHES[1])
    expected = logits(load_plain(folder))
    refused: list[BaseException | None] = []

    def intrude(*_: Any) -> None:
        experts, hidden, ids, weights = _routing(model)

        def call() -> None:
            experts(hidden.requires_grad_(), ids, weights)

        refused.append(in_thread(call).exception(WAIT_SECONDS))

    handle = model.model.layers[1].mlp.experts.act_fn.register_forward_pre_hook(intrude)
    assert torch.equal(logits(model), expected)
    handle.remove()
    assert all(isinstance(error, pipeload.UnsupportedOperationError) for error in refused)
    assert refused
    assert_nothing_held(model)


@torch.no_grad()
def test_nothing_stays_of_a_layer_that_failed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was on its way when it did is gone, and counted as gone."""
    model = load_streamed(folder, spare=1_000)
    expected = logits(model)
    multiply, left = torch.mm, [5]

    def fail(*args: Any, **kwargs: Any) -> torch.Tensor:
        left[0] -= 1
        if not left[0]:
            raise ArithmeticError("made up")
        return multiply(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "mm", fail)
        with pytest.raises(ArithmeticError):
            logits(model)
    views = [v for seat in experts_of(model).seats for v in seat.memory.views.values()]
    assert all(view.isnan().all() for view in views)
    assert model.pipeload.stats().expert_bytes == 0
    assert torch.equal(logits(model), expected)
