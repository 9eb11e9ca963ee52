"""Passes that no formula describes: their estimate against measured peaks, and what is tried."""

from __future__ import annotations

import gc
import json
import os
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import (
    ChameleonConfig,
    ClvpDecoderConfig,
    ClvpForCausalLM,
    LlamaConfig,
    T5Config,
)

import pipeload.hf.cache_layers  # noqa: F401 - caches are read by it
from pipeload.budget import pass_trial
from pipeload.budget.hint_pass import hinted_calls
from pipeload.budget.pass_needs import PassNeeds, PassShape
from pipeload.budget.pass_shape import reads_text_alone
from pipeload.budget.pass_trial import PassTrace, Trial
from pipeload_hooks import try_out
from tests.rooms.budget.test_pass_needs import ids
from tests.support.children import printed_warmly
from tests.support.models import random_model, tiny_config

FAMILIES = """
import gc, json, sys, torch, transformers as T
from pathlib import Path
import pipeload.hf.cache_layers
from pipeload.system.memory import peak_rss_bytes, return_freed_memory, rss_bytes
from pipeload.budget.pass_needs import PassNeeds
T.logging.set_verbosity_error()
torch.set_num_threads(2)
return_freed_memory()
def ids(*shape):
    return torch.randint(3, 99, shape)
def padded(*shape):
    mask = torch.ones(shape).tril(shape[1] // 2).long()
    return {"input_ids": ids(*shape), "attention_mask": mask}
def picture(batch, side, other=None):
    return {"pixel_values": torch.randn(batch, 3, side, other or side)}
small = dict(hidden_size=384, num_hidden_layers=4, num_attention_heads=6, intermediate_size=1536)
t5 = T.T5Config(d_model=256, d_ff=512, d_kv=32, num_layers=3, num_heads=8, vocab_size=999)
sound = dict(conv_dim=[128] * 7, num_conv_pos_embeddings=32, num_conv_pos_embedding_groups=8)
swin = dict(embed_dim=64, depths=[2, 2, 4], num_heads=[2, 4, 8])
sam = dict(image_size=512, hidden_size=256, num_hidden_layers=3, num_attention_heads=4, mlp_dim=512)
sam |= dict(global_attn_indexes=[1], output_channels=64)
decoder = dict(hidden_size=64, mask_decoder_hidden_size=64)
bart = dict(d_model=256, encoder_layers=3, decoder_layers=3, encoder_ffn_dim=1024, vocab_size=999)
whole = {"llama": dict(small, model_type="llama", vocab_size=999)}
FAMILIES = {
    "t5_encoder": (lambda: T.T5EncoderModel(t5), {"input_ids": ids(1, 700)}),
    "bart": (lambda: T.BartForConditionalGeneration(T.BartConfig(**bart)),
        {**padded(4, 400), "decoder_input_ids": ids(4, 200)}),
    "roberta_head": (lambda: T.RobertaForMaskedLM(T.RobertaConfig(vocab_size=20000, **small)),
        padded(3, 200)),
    "dinov2": (lambda: T.Dinov2Model(T.Dinov2Config(**small)), picture(6, 224)),
    "swinv2": (lambda: T.Swinv2Model(T.Swinv2Config(image_size=256, window_size=8, **swin)),
        picture(2, 256)),
    "donut": (lambda: T.DonutSwinModel(T.DonutSwinConfig(image_size=[320, 240], **swin)),
        picture(2, 320, 240)),
    "sam": (lambda: T.SamVisionModel(T.SamVisionConfig(**sam)), picture(1, 512)),
    "hubert": (
        lambda: T.HubertModel(T.HubertConfig(**small, **sound, feat_extract_norm="layer")),
        {"input_values": torch.randn(1, 16000 * 8)}),
}
def measured(make, inputs):
    model = make().eval()
    estimate = PassNeeds(model, model.config).for_pass((), inputs)
    peaks = []
    for _ in range(2):
        gc.collect()
        before = rss_bytes()
        Path("/proc/self/clear_refs").write_text("5")
        with torch.no_grad():
            model(**inputs)
        peaks.append(peak_rss_bytes() - before)
    return estimate, peaks[-1]
print(json.dumps({name: measured(*family) for name, family in FAMILIES.items()}))
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux")
def test_estimates_of_all_kinds_hold() -> None:
    """Patches, windows, stages, frames, position biases: never under, nor a third over."""
    for name, (estimate, peak) in json.loads(printed_warmly(FAMILIES).splitlines()[-1]).items():
        assert peak > 15_000_000, name
        assert estimate > 0.97 * peak, (name, estimate, peak)
        assert estimate < 1.3 * peak + 8_000_000, (name, estimate, peak)


def on_meta(cls: Any, config: Any) -> Any:
    with torch.device("meta"):
        return cls(config).eval()


def bert(**more: Any) -> Any:
    from transformers import BertConfig, BertModel

    sizes: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
    return on_meta(BertModel, BertConfig(num_hidden_layers=6, **(sizes | more)))


def test_a_size_is_tried_once() -> None:
    """The same input is not tried again; another mask, length or setting is."""
    model = bert()
    needs = PassNeeds(model, model.config)
    padded = torch.ones(2, 32, dtype=torch.long)
    padded[0, :9] = 0
    calls: list[dict[str, Any]] = [
        {"input_ids": ids(32)},
        {"input_ids": ids(32) + 1},
        {"input_ids": ids(32), "attention_mask": torch.ones(2, 32, dtype=torch.long)},
        {"input_ids": ids(32), "attention_mask": padded},
        {"input_ids": ids(33)},
        {"input_ids": ids(32), "output_hidden_states": True},
    ]
    tried = []
    with mock.patch.object(pass_trial, "try_out", wraps=try_out) as run:
        for call in [*calls, *calls]:
            needs.for_pass((), call)
            tried.append(run.call_count)
        model.set_attn_implementation("eager")
        needs.for_pass((), calls[0])
        assert run.call_count == tried[-1] + 1
    assert tried == [1, 1, 2, 3, 4, 5] + [5] * 6


def test_what_a_setting_takes_is_seen() -> None:
    """Eager attention writes scores out, of every layer where they are kept."""
    model = bert()
    needs, call = PassNeeds(model, model.config), {"input_ids": ids(256)}
    fused = needs.for_pass((), call)
    model.set_attn_implementation("eager")
    eager = needs.for_pass((), call)
    scores = 2 * 4 * 256 * 256 * 4
    assert eager - fused > scores
    assert needs.for_pass((), call | {"output_attentions": True}) - eager > 4 * scores


def test_decoders_that_are_known_are_not_tried() -> None:
    """What is known of all of them holds for this one: no copy is kept, nothing runs."""
    for family in ("llama", "qwen3", "gpt2"):
        config = tiny_config(family, hidden_size=96)
        model = random_model(config, torch.bfloat16, seed=1)
        needs = PassNeeds(model, config)
        with mock.patch.object(pass_trial, "try_out") as run:
            needs.for_pass((), {"input_ids": ids(40)})
        assert not run.called, family


def test_what_sampling_takes_is_no_difference() -> None:
    """A large vocabulary hides nothing of a decoder that is known, nor of one that is not."""
    from transformers import OPTConfig, OPTForCausalLM

    sizes: dict[str, Any] = {"vocab_size": 32000, "hidden_size": 512, "num_attention_heads": 8}
    opt = OPTConfig(**sizes, ffn_dim=2048, num_hidden_layers=4, word_embed_proj_dim=512)
    known = tiny_config("llama", vocab_size=32000, hidden_size=96)
    for model, tried in (
        (random_model(known, torch.bfloat16, seed=1), False),
        (on_meta(OPTForCausalLM, opt).to(torch.bfloat16), True),
    ):
        needs = PassNeeds(model, model.config)
        with mock.patch.object(pass_trial, "try_out", wraps=try_out) as run:
            needs.for_pass((), {"input_ids": ids(40)})
        assert run.called == tried, type(model)


def test_words_that_come_again_beside_their_cache_are_tried() -> None:
    """A model that is given all of them, and cuts off by itself what it has seen."""
    from transformers import LlamaModel

    config: Any = tiny_config("llama")
    model: Any = LlamaModel(config).eval()
    with torch.inference_mode():
        caches = [model(input_ids=ids(seen)).past_key_values for seen in (8, 9)]
    needs = PassNeeds(bert(), bert().config)
    with mock.patch.object(pass_trial, "try_out", wraps=try_out) as run:
        for cache in (*caches, *caches):
            needs.for_pass((), {"input_ids": ids(12), "past_key_values": cache})
        assert run.call_count >= 2
        before = run.call_count
        needs.for_pass((), {"input_ids": ids(4), "past_key_values": caches[0]})
        assert run.call_count == before
        needs.for_pass((), {"input_ids": ids(7), "past_key_values": caches[1]})  # two are its own
    assert run.call_count > before


def test_the_next_token_is_not_tried() -> None:
    """A cache with something in it is described by what is in it."""
    from transformers import LlamaModel

    config: Any = tiny_config("llama")
    model: Any = LlamaModel(config).eval()
    needs = PassNeeds(model, config)
    with torch.inference_mode():
        cache = model(input_ids=ids(8)).past_key_values
    with mock.patch.object(pass_trial, "try_out") as run:
        assert needs.for_pass((), {"input_ids": ids(1), "past_key_values": cache}) > 0
    assert not run.called


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")
def test_caches_of_fixed_sizes() -> None:
    """Each size is another call, one whose memory is there already is, too; none is copied."""
    from transformers import LlamaModel, StaticCache

    config: Any = tiny_config("llama")
    model: Any = LlamaModel(config).eval()
    needs = PassNeeds(model, config)
    taken = []
    for length in (100, 5000):
        cache: Any = StaticCache(config=config, max_cache_len=length)
        call = {"input_ids": ids(8), "past_key_values": cache}
        taken.append(needs.for_pass((), call))
    with torch.no_grad():
        model(**call)
    cache.reset()
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert taken[1] - taken[0] > 0.9 * held
    assert taken[1] - needs.for_pass((), call) > 0.9 * held
    copied = pass_trial._without_values(cache)
    assert all(layer.keys.is_meta and layer.values.is_meta for layer in copied.layers)


def test_logits_that_nobody_makes_are_not_counted() -> None:
    """A large vocabulary costs a model without a head nothing."""
    few, many = bert(vocab_size=100), bert(vocab_size=100_000)
    call = {"input_ids": ids(128)}
    assert PassNeeds(few, few.config).for_pass((), call) == PassNeeds(many, many.config).for_pass(
        (), call
    )


def test_an_encoder_that_is_called_by_itself() -> None:
    """`generate` does that; the same words are not its decoder's."""
    from transformers import T5ForConditionalGeneration

    sizes: dict[str, Any] = {
        "d_model": 64,
        "d_ff": 128,
        "num_layers": 3,
        "num_heads": 4,
        "vocab_size": 50_000,
    }
    model = on_meta(T5ForConditionalGeneration, T5Config(**sizes))
    needs, call = PassNeeds(model, model.config), {"input_ids": ids(256)}
    encoder = needs.for_pass((), call, model.get_encoder())
    assert 2 * 4 * 256 * 256 * 4 < encoder < 2 * 256 * 50_000 * 4
    # For the hint: the encoder, then a decoder with a cache of both.
    assert needs.for_shape(PassShape(256, 2)) >= encoder


def test_hints_stand_for_what_a_model_reads() -> None:
    """Pictures and sounds of the usual size; as many as the batch."""
    from transformers import ViTConfig, ViTModel, WhisperConfig, WhisperForConditionalGeneration

    sizes: dict[str, Any] = {
        "encoder_layers": 3,
        "decoder_layers": 3,
        "d_model": 64,
        "vocab_size": 60,
    }
    heads: dict[str, Any] = {
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "pad_token_id": 0,
    }
    whisper = on_meta(WhisperForConditionalGeneration, WhisperConfig(**sizes, **heads))
    vit = on_meta(ViTModel, ViTConfig(hidden_size=48, num_attention_heads=4, image_size=64))
    for model, call, part in (
        (whisper, {"input_features": torch.zeros(2, 80, 3000)}, whisper.get_encoder()),
        (vit, {"pixel_values": torch.zeros(2, 3, 64, 64)}, None),
    ):
        needs = PassNeeds(model, model.config)
        need = needs.for_pass((), call, part)
        assert need <= needs.for_shape(PassShape(100, 2)) < 1.5 * need


class Stacked(torch.nn.Module):
    """Reads frames of which each is several neighbours' bins."""

    main_input_name = "input_features"

    def __init__(self, bins: int, times: int) -> None:
        super().__init__()
        self.config: Any = T5Config()
        self.config.num_mel_bins = bins
        self.encoder = torch.nn.Linear(bins * times, 64)
        self.head = torch.nn.Linear(64, 10_000)

    def forward(self, input_features: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(input_features))  # type: ignore[no-any-return]


@pytest.mark.parametrize("times", [1, 4])
def test_frames_of_several_neighbours_are_hinted(times: int) -> None:
    """As wide as the first Linear reads."""
    model: Any = Stacked(80, times).to("meta")
    trace = PassTrace(model, torch.float32)
    trials = [trace.of("", (), call) for call in hinted_calls(model, PassShape(50, 1))]
    best = max(trial.peak for trial in trials if trial is not None and trial.error is None)
    assert best >= 2 * 50 * 10_000 * 4


def test_what_cannot_be_tried_is_estimated_all_the_same() -> None:
    """Arguments may be anything; what was counted until a trial ended is the least."""
    model = bert()
    needs = PassNeeds(model, model.config)

    def fail(*_: object, **__: object) -> Any:
        raise ZeroDivisionError

    assert needs.for_pass((object(), ids(3)), {"input_ids": {1: fail}}) > 0
    before = needs.for_pass((), {"input_ids": ids(200)})
    trace: Any = needs._trace
    assert trace is not None
    trace.model.pooler.forward = fail
    trace._known.clear()
    trace._short = None
    assert needs.for_pass((), {"input_ids": ids(200)}) >= before


def test_a_trial_that_ends_early_counts_for_more() -> None:
    """By as much as weights are missing; not where a real pass would end, too."""
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(3)))
    call, one = (torch.zeros(100, 64),), 100 * 64 * 4
    cases = ((1, RuntimeError, 3), (2, RuntimeError, 1.5), (1, TypeError, 1))
    for index, error, times in cases:
        trace = PassTrace(model, torch.float32)
        trace.model[index].forward = mock.Mock(side_effect=error)
        ended = trace.of("", call, {})
        assert ended is not None
        assert isinstance(ended.error, error)
        assert ended.peak == int(times * one * min(2, index))


def test_a_model_whose_features_have_names() -> None:
    """A backbone gives stages, by their names, and no logits."""
    from transformers import ResNetBackbone, ResNetConfig

    sizes: dict[str, Any] = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}
    model = on_meta(ResNetBackbone, ResNetConfig(**sizes))
    model.out_features = ["stage1", "stage2"]
    call = {"pixel_values": torch.zeros(2, 3, 64, 64)}
    assert PassNeeds(model, model.config).for_pass((), call) > 0


def test_a_kernel_of_a_convolution_takes_less_in_fp32() -> None:
    """Than in half precision; and few are kept."""
    each: list[float] = []
    for dtype in (torch.float32, torch.bfloat16):
        model = bert().to(dtype)
        needs = PassNeeds(model, model.config)

        def of(kernels: int, needs: PassNeeds = needs) -> int:
            trial = Trial(10_000_000, 0, kernels)
            return needs._with_trial(trial, PassShape(1, 1), sampled=False)

        each.append((of(21) - of(1)) / 20)
        assert of(1) - of(0) > 600_000
        assert of(32) == of(1000) > of(20)
    assert 100_000 < each[0] < 150_000 < each[1]


class Paced(torch.nn.Module):
    """Looks at a buffer that has its value only once weights are there."""

    step: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.config = object()
        self.linear = torch.nn.Linear(8, 8)
        self.register_buffer("step", torch.tensor(2), persistent=False)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.linear(states)[:: int(self.step.item())]
        return result


def test_buffers_of_the_model_that_runs_are_known() -> None:
    """When the copy was made they had no values yet."""
    with torch.device("meta"):
        model = Paced()
    trace, call = PassTrace(model, torch.float32), (torch.zeros(64, 8),)
    early = trace.of("", call, {})
    assert early is not None
    assert early.error is not None
    model.step = torch.tensor(2)
    late = trace.of("", call, {}, model)
    assert late is not None
    assert late.output.shape == (32, 8)


def test_a_trace_holds_no_model() -> None:
    """A copy without weights, and names by the parts that there still are."""
    model: Any = random_model(tiny_config("llama"), torch.float32, seed=1).model
    trace = PassTrace(model, torch.float32)
    assert trace.path(model.layers[0]) == ""
    gone = weakref.ref(model)
    assert all(parameter.is_meta for parameter in trace.model.parameters())
    del model
    gc.collect()
    assert gone() is None
    assert not trace._paths


def test_what_is_known_of_decoders_is_tried_in_short_sequences_too() -> None:
    """Scores of long ones hide what this one holds beside them."""
    config = ClvpDecoderConfig(
        hidden_size=64,
        num_attention_heads=4,
        num_hidden_layers=3,
        vocab_size=320,
        max_position_embeddings=512,
    )
    with torch.device("meta"):
        model = ClvpForCausalLM(config)
    call = {"input_ids": ids(24, 400)}
    trial = PassTrace(model, torch.float32).of("", (), call)
    assert trial is not None
    assert trial.error is None
    assert PassNeeds(model, config).for_pass((), call) > trial.peak


def test_a_model_with_a_codec_is_no_decoder_alone() -> None:
    """It generates from pictures, of which nothing is known but by trials."""
    assert reads_text_alone(LlamaConfig())
    assert not reads_text_alone(ChameleonConfig())
