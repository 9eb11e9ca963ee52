"""PEFT's adapters on streamed models, put on before or after, are what they are on plain ones."""

from __future__ import annotations

import copy
import gc
import itertools
import re
from typing import TYPE_CHECKING, Any

import peft as untyped_peft
import pytest
import torch

import pipeload
from pipeload import MemoryLimitError, UnsupportedModelError, UnsupportedOperationError
from pipeload.budget import cut
from pipeload.budget.shared_limit import ACCOUNTANT
from pipeload.system.memory import trim_heap
from pipeload_hooks import EvictedWeightWatch
from tests.support.models import load_plain
from tests.support.streaming import (
    IDS,
    assert_nothing_held,
    generated,
    load_streamed,
    logits,
    smallest_limit,
    steady_floor,
)
from tests.support.sweeps import few

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.conftest import TinyCheckpoint

peft: Any = untyped_peft

pytestmark = [
    # PEFT asks for what transformers have renamed.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    # PEFT's words on adapters that hold a head or an embedding.
    pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Both `past_key_values` and `cache` are set:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Position ids are not supported:UserWarning"),
    # What it says of several adapters.
    pytest.mark.filterwarnings("ignore:Already found a `peft_config` attribute:UserWarning"),
    pytest.mark.filterwarnings("ignore:Adapter other was active which is now:UserWarning"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`:UserWarning"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning"),
]

LAYERS = ["q_proj", "o_proj", "down_proj"]
ENOUGH = 10_000_000
"""Spare bytes with which everything fits."""
# Blocks whole, or cut into modules and ranges of rows; at the smallest limit, and with more.
each_grain = pytest.mark.parametrize(
    ("modules", "spare"), [(False, 0), (False, 300_000), (True, 0), (True, 300_000)]
)
GRAINS = [(False, 300_000), (True, 0)]
two_grains = pytest.mark.parametrize(("modules", "spare"), GRAINS)


def lora(**options: Any) -> peft.LoraConfig:
    return peft.LoraConfig(
        **({"r": 4, "lora_alpha": 8, "target_modules": LAYERS, "task_type": "CAUSAL_LM"} | options)
    )


def virtual(kind: Any, **options: Any) -> Any:
    return kind(task_type="CAUSAL_LM", num_virtual_tokens=4, **options)


CONFIGS: dict[str, Callable[[], Any]] = {
    "lora": lora,
    "other": lambda: lora(r=2, target_modules=["v_proj", "down_proj"]),
    "rslora": lambda: lora(use_rslora=True),
    "bias": lambda: lora(target_modules=["gate_proj"], modules_to_save=["norm"]),
    "ia3": lambda: peft.IA3Config(
        task_type="CAUSAL_LM",
        target_modules=["k_proj", "v_proj", "down_proj"],
        feedforward_modules=["down_proj"],
    ),
    "loha": lambda: peft.LoHaConfig(task_type="CAUSAL_LM", target_modules=LAYERS, r=4),
    "saved head": lambda: lora(modules_to_save=["lm_head"]),
    "saved embedding": lambda: lora(modules_to_save=["embed_tokens"]),
    "saved layer": lambda: lora(target_modules=["q_proj"], modules_to_save=["gate_proj"]),
    "embedding": lambda: lora(target_modules=["embed_tokens", "q_proj"]),
    "head": lambda: lora(target_modules=["lm_head", "q_proj"]),
    "prompt": lambda: virtual(peft.PromptTuningConfig),
    "prefix": lambda: virtual(peft.PrefixTuningConfig),
    "p-tuning": lambda: virtual(peft.PromptEncoderConfig, encoder_hidden_size=16),
}
BESIDE: dict[str, Callable[[], Any]] = {
    "dora": lambda: lora(use_dora=True),
    "dora head": lambda: lora(target_modules=["lm_head"], use_dora=True),
    "dora embedding": lambda: lora(target_modules=["embed_tokens"], use_dora=True),
    "tokens": lambda: lora(trainable_token_indices=[3, 5, 7]),
    "parameters": lambda: lora(target_modules=[], target_parameters=["mlp.up_proj.weight"]),
}
"""These use a weight beside the module that owns it, which is not always there then."""
LIKE_LORA = {"other", "rslora", "loha", "saved layer", "p-tuning"}
"""Which differ from others in what PEFT computes with them alone."""


@pytest.fixture(autouse=True)
def small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny matrices have several ranges of rows, and tiny tables are read by rows."""
    monkeypatch.setattr(cut, "CHUNKS", (1 << 14,))
    monkeypatch.setattr(cut, "_TABLE_BYTES", 1 << 12)


def put_on(model: Any, path: Path, **options: Any) -> Any:
    return peft.PeftModel.from_pretrained(model, path, **options).eval()


class Answer:
    """Logits and tokens of a model, to be compared to the last bit."""

    def __init__(self, model: Any, **options: Any) -> None:
        with torch.no_grad():
            self.logits = model(input_ids=IDS, **options).logits
        self.tokens = model.generate(input_ids=IDS, max_new_tokens=4, do_sample=False, **options)

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Answer)
        assert not self.logits.isnan().any()
        return torch.equal(self.logits, other.logits) and torch.equal(self.tokens, other.tokens)

    __hash__ = None  # type: ignore[assignment]


class Lab:
    """A checkpoint, saved adapters of it, and what plain models answer."""

    def __init__(self, folder: Path, path: Path) -> None:
        self.folder, self._path = folder, path
        self._answers: dict[str, Answer] = {}

    def plain(self) -> Any:
        return load_plain(self.folder)

    def adapter(self, name: str) -> Path:
        """The folder of an adapter whose every parameter is random; made once."""
        path = self._path / name
        if not path.exists():
            model = peft.get_peft_model(self.plain(), (CONFIGS | BESIDE)[name]())
            generator = torch.Generator().manual_seed(len(name))
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.requires_grad:
                        parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
            model.save_pretrained(path)
        return path

    def adapted(self, name: str) -> Any:
        return put_on(self.plain(), self.adapter(name))

    def wanted(self, name: str = "") -> Answer:
        """What a plain model answers with an adapter, or without one."""
        if name not in self._answers:
            self._answers[name] = Answer(self.adapted(name) if name else self.plain())
        return self._answers[name]


@pytest.fixture(scope="module")
def lab(tiny: TinyCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(tiny("llama"), tmp_path_factory.mktemp("adapters"))


def limit_for(folder: Path, spare: int = 0) -> int:
    return smallest_limit(folder, dtype="auto") + spare


def wrap(model: Any, spare: int, *, modules: bool, **options: Any) -> Any:
    """Streamed with `spare` bytes over the smallest limit, whatever that is for this model."""
    with steady_floor(modules=modules):
        try:
            return pipeload.wrap(model, 1, **options)
        except MemoryLimitError as error:
            return pipeload.wrap(model, error.smallest_limit + spare, **options)


def assert_streams(model: Any) -> None:
    assert pipeload.handle(model).plan.bytes_per_pass > 0
    assert_nothing_held(model)


# -- one adapter ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("modules", "spare", "name"),
    few(
        [(*grain, name) for grain in GRAINS for name in CONFIGS],
        [(True, 0, name) for name in CONFIGS]
        + [(False, 300_000, name) for name in ("lora", "saved head", "prefix")],
    ),
)
def test_put_on_a_streamed_model(modules: bool, spare: int, name: str, lab: Lab) -> None:
    """Of every kind, on a model that has run before; plain and right after remove()."""
    model = load_streamed(lab.folder, spare=spare, modules=modules)
    assert Answer(model) == lab.wanted()
    adapted = put_on(model, lab.adapter(name))
    assert Answer(adapted) == lab.wanted(name)
    assert adapted.pipeload is pipeload.handle(adapted) is model.pipeload
    assert_streams(model)
    pipeload.handle(adapted).remove()
    assert Answer(adapted) == lab.wanted(name)


@pytest.mark.parametrize(
    ("modules", "spare", "name"),
    few(
        [
            *((True, 0, name) for name in CONFIGS | BESIDE),
            *((False, 300_000, name) for name in ("lora", "saved head", "head", "dora")),
        ],
        [
            *((True, 0, name) for name in (CONFIGS | BESIDE).keys() - LIKE_LORA),
            *((False, 300_000, name) for name in ("saved head", "dora")),
        ],
    ),
)
def test_streamed_with_the_adapter_on(modules: bool, spare: int, name: str, lab: Lab) -> None:
    """wrap(peft_model): what the adapter uses beside its module is in memory when it is used."""
    adapted = lab.adapted(name)
    assert wrap(adapted, spare, modules=modules) is adapted
    for _ in range(2):
        assert Answer(adapted) == lab.wanted(name)
    assert pipeload.handle(adapted).plan.bytes_per_pass > 0
    pipeload.handle(adapted).remove()
    assert Answer(adapted) == lab.wanted(name)


@pytest.mark.parametrize(
    ("spare", "name"),
    few(
        itertools.product((100_000, 400_000), ("lora", "ia3", "saved head", "embedding", "head")),
        [(100_000, "lora"), (400_000, "ia3"), (100_000, "saved head"), (400_000, "embedding")],
    ),
)
def test_a_folder_with_an_adapter(spare: int, name: str, lab: Lab) -> None:
    """from_pretrained of it loads both, and so does a script of PEFT's own inside streaming()."""
    with steady_floor(modules=True):
        limit = limit_for(lab.folder, spare)
        model = pipeload.from_pretrained(lab.adapter(name), memory_limit=limit)
    assert Answer(model) == lab.wanted(name)
    assert_streams(model)
    with steady_floor(modules=True), pipeload.streaming(memory_limit=limit):
        adapted = peft.AutoPeftModelForCausalLM.from_pretrained(lab.adapter(name))
    assert Answer(adapted) == lab.wanted(name)
    assert_streams(adapted)
    pipeload.handle(adapted).remove()
    assert Answer(adapted) == lab.wanted(name)


def test_adapter_kwargs(lab: Lab, tmp_path: Path) -> None:
    """They reach the library: the adapter is found in a subfolder."""
    lab.adapter("lora")
    (tmp_path / "inner").symlink_to(lab.adapter("lora"))
    with steady_floor(modules=True):
        model = pipeload.from_pretrained(
            tmp_path,
            memory_limit=limit_for(lab.folder, 100_000),
            adapter_kwargs={"subfolder": "inner"},
        )
    assert Answer(model) == lab.wanted("lora")


@pytest.mark.parametrize(
    ("modules", "spare", "name"),
    few(
        [(*grain, name) for grain in GRAINS for name in BESIDE],
        [*((True, 0, name) for name in BESIDE), (False, 300_000, "dora")],
    ),
)
def test_used_beside_its_module(modules: bool, spare: int, name: str, lab: Lab) -> None:
    """Put on later, it is exact or refused by the weight's name, and never wrong.

    It is right after the way out that the error names, and when the adapter is disabled.
    """
    model = load_streamed(lab.folder, spare=spare, modules=modules)
    logits(model)
    adapted = put_on(model, lab.adapter(name))
    refusal = refused(adapted)
    if refusal is None:
        assert Answer(adapted) == lab.wanted(name)
        return
    assert re.search(r"weight '(model\.layers\.0|lm_head|model\.embed_tokens)\.", refusal)
    assert "pipeload.wrap(model)" in refusal
    assert refused(adapted) == refusal
    with adapted.disable_adapter():
        assert Answer(adapted) == lab.wanted()
    pipeload.handle(adapted).remove()
    assert Answer(adapted) == lab.wanted(name)
    assert Answer(wrap(adapted, spare, modules=True)) == lab.wanted(name)


def refused(model: Any) -> str | None:
    """What a pass of it is refused with."""
    try:
        logits(model)
    except UnsupportedModelError as error:
        return str(error)
    return None


def test_made_from_weights_on_disk(lab: Lab) -> None:
    """What DoRA computes when it is made is NaN: refused until it has values, or is gone."""
    model = load_streamed(lab.folder)
    adapted = peft.get_peft_model(model, lora(use_dora=True)).eval()
    for _ in range(2):
        with pytest.raises(
            UnsupportedOperationError, match=r"lora_magnitude_vector.*pipeload\.wrap"
        ):
            logits(adapted)
    state = peft.get_peft_model_state_dict(lab.adapted("dora"))
    peft.set_peft_model_state_dict(adapted, state)
    assert Answer(adapted) == lab.wanted("dora")
    adapted.add_adapter("fresh", lora(use_dora=True))
    with pytest.raises(UnsupportedOperationError, match="fresh"):
        logits(adapted)
    adapted.delete_adapter("fresh")
    assert Answer(adapted) == lab.wanted("dora")


def test_weights_that_an_adapter_changes(lab: Lab) -> None:
    """PiSSA takes a part out of the weights it is made of: they stay as it leaves them."""
    model = load_streamed(lab.folder, spare=ENOUGH)
    logits(model)
    logits(model)  # all is in memory now
    torch.manual_seed(0)
    adapted = peft.get_peft_model(model, lora(init_lora_weights="pissa")).eval()
    torch.manual_seed(0)
    plain = peft.get_peft_model(load_plain(lab.folder), lora(init_lora_weights="pissa")).eval()
    assert Answer(adapted) == Answer(plain)
    model.pipeload._session.governor.shrink(0)
    assert Answer(adapted) == Answer(plain)
    with pytest.raises(UnsupportedOperationError, match=r"q_proj\.weight.*spill_dir"):
        peft.get_peft_model(load_streamed(lab.folder), lora(init_lora_weights="pissa"))


# -- several, and what is done with them ----------------------------------------------------------


@each_grain
def test_switching(modules: bool, spare: int, lab: Lab) -> None:
    """Several, changed between passes, disabled, deleted, and all taken off."""
    model = load_streamed(lab.folder, spare=spare, modules=modules)
    adapted = put_on(model, lab.adapter("lora"), adapter_name="lora")
    assert Answer(adapted) == lab.wanted("lora")
    adapted.load_adapter(lab.adapter("other"), adapter_name="other")
    for name in ("other", "lora", "other"):
        adapted.set_adapter(name)
        assert Answer(adapted) == lab.wanted(name)
        with adapted.disable_adapter():
            assert Answer(adapted) == lab.wanted()
    adapted.delete_adapter("other")
    adapted.set_adapter("lora")
    assert Answer(adapted) == lab.wanted("lora")
    base = adapted.unload()
    assert base is model
    assert Answer(base) == lab.wanted()
    assert [name for name, _ in base.named_parameters() if "lora" in name] == []
    assert_streams(base)
    base.pipeload.remove()
    assert Answer(base) == lab.wanted()


def test_switching_to_one_that_cannot_be_served(lab: Lab) -> None:
    """An adapter that was not active in the first pass is not overlooked in a later one."""
    model = load_streamed(lab.folder, modules=True)
    adapted = put_on(model, lab.adapter("lora"), adapter_name="lora")
    adapted.load_adapter(lab.adapter("dora"), adapter_name="dora")
    for _ in range(2):
        assert Answer(adapted) == lab.wanted("lora")
    adapted.set_adapter("dora")
    with pytest.raises(UnsupportedModelError, match="adapter"):
        logits(adapted)
    adapted.set_adapter("lora")
    assert Answer(adapted) == lab.wanted("lora")


@two_grains
def test_several_at_once(modules: bool, spare: int, lab: Lab) -> None:
    """A batch in which every row has an adapter of its own, or none; a weighted sum of two."""
    answers = []
    for model in (lab.plain(), load_streamed(lab.folder, spare=spare, modules=modules)):
        adapted = put_on(model, lab.adapter("lora"), adapter_name="lora")
        adapted.load_adapter(lab.adapter("rslora"), adapter_name="rslora")
        names = ["lora", "__base__", "rslora"]
        ids = IDS.repeat(3, 1)
        with torch.no_grad():
            mixed = adapted(input_ids=ids, adapter_names=names).logits
        tokens = adapted.generate(
            input_ids=ids, adapter_names=names, max_new_tokens=4, do_sample=False
        )
        adapted.add_weighted_adapter(["lora", "rslora"], [0.7, 0.3], "sum", "linear")
        adapted.set_adapter("sum")
        answers.append((mixed, tokens, logits(adapted)))
    for plain, streamed in zip(*answers, strict=True):
        assert torch.equal(plain, streamed)
    assert not torch.equal(answers[0][0][0], answers[0][0][1])


@two_grains
def test_the_librarys_own_integration(
    modules: bool, spare: int, lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """model.load_adapter() and its kin, without a PeftModel."""
    # The library asks for a newer PEFT than there may be, and uses nothing that is new in it.
    monkeypatch.setattr("transformers.integrations.peft.check_peft_version", lambda **_: None)
    model = load_streamed(lab.folder, spare=spare, modules=modules)
    model.load_adapter(lab.adapter("rslora"), adapter_name="one")
    assert Answer(model) == lab.wanted("rslora")
    model.load_adapter(lab.adapter("other"), adapter_name="two")
    for name, wanted in {"two": "other", "one": "rslora"}.items():
        model.set_adapter(name)
        assert Answer(model) == lab.wanted(wanted)
        model.disable_adapters()
        assert Answer(model) == lab.wanted()
        model.enable_adapters()
    model.delete_adapter("two")
    assert Answer(model) == lab.wanted("rslora")
    assert_streams(model)
    model.pipeload.remove()
    assert Answer(model) == lab.wanted("rslora")
    model = load_streamed(lab.folder, spare=spare, modules=modules)
    model.load_adapter(lab.adapter("saved head"))
    assert Answer(model) == lab.wanted("saved head")


def test_added_to_a_model_that_was_wrapped_with_one(lab: Lab) -> None:
    """A second adapter, and the first one read again from its file."""
    adapted = wrap(put_on(lab.plain(), lab.adapter("lora"), adapter_name="lora"), 0, modules=True)
    adapted.load_adapter(lab.adapter("other"), adapter_name="other")
    adapted.set_adapter("other")
    assert Answer(adapted) == lab.wanted("other")
    state = peft.get_peft_model_state_dict(lab.adapted("rslora"))
    peft.set_peft_model_state_dict(adapted, state, adapter_name="lora")
    adapted.set_adapter("lora")
    changed = lab.adapted("lora")
    peft.set_peft_model_state_dict(changed, state)
    assert Answer(adapted) == Answer(changed)


def test_a_real_model(smollm2_bf16: Path, tmp_path: Path) -> None:
    """bf16 with a tied head and a table of 57 MB, and an adapter of fp32."""
    torch.manual_seed(1)
    plain = peft.get_peft_model(load_plain(smollm2_bf16), lora(r=8, init_lora_weights=False))
    plain.save_pretrained(tmp_path)
    reference = put_on(load_plain(smollm2_bf16), tmp_path)
    expected = Answer(reference)
    del reference
    adapted = put_on(load_streamed(smollm2_bf16, modules=True), tmp_path)
    assert Answer(adapted) == expected
    assert pipeload.handle(adapted).plan.bytes_per_pass > 0
    pipeload.handle(adapted).remove()


# -- merging, saving, training --------------------------------------------------------------------

MERGES: dict[str, Callable[[Any], object]] = {
    "merge_adapter": lambda adapted: adapted.merge_adapter(),
    "merge_and_unload": lambda adapted: adapted.merge_and_unload(),
    "safely": lambda adapted: adapted.merge_and_unload(safe_merge=True),
    "unmerge_adapter": lambda adapted: adapted.unmerge_adapter(),
    "layer": lambda adapted: lora_layer(adapted).merge(),
    "layer, unmerge": lambda adapted: lora_layer(adapted).unmerge(),
}


def lora_layer(adapted: Any) -> Any:
    return next(m for m in adapted.modules() if isinstance(m, peft.tuners.lora.Linear))


@pytest.mark.parametrize("when", ["before", "after", "used", "fits", "folder"])
def test_merging_is_refused(when: str, lab: Lab, tmp_path: Path) -> None:
    """Whole, with the way out, which works; the model goes on as it was."""
    if when == "before":
        adapted = wrap(lab.adapted("lora"), 0, modules=True)
    elif when == "folder":
        with steady_floor(modules=True), pipeload.streaming(limit_for(lab.folder, 100_000)):
            adapted = peft.AutoPeftModelForCausalLM.from_pretrained(lab.adapter("lora"))
    else:
        adapted = load_streamed(lab.folder, spare=ENOUGH if when == "fits" else 0)
        for _ in range(0 if when == "after" else 2):
            logits(adapted)
        adapted = put_on(adapted, lab.adapter("lora"))
    for name, merge in MERGES.items():
        way_out = r"remove\(\).*pipeload\.wrap.*spill_dir"
        with pytest.raises(UnsupportedOperationError, match=way_out):
            merge(adapted)
        assert torch.equal(logits(adapted), lab.wanted("lora").logits), name
    assert Answer(adapted) == lab.wanted("lora")
    pipeload.handle(adapted).remove()
    merged, expected = adapted.merge_and_unload(), Answer(lab.adapted("lora").merge_and_unload())
    assert Answer(merged) == expected
    pipeload.wrap(merged, wrap_limit(lab), spill_dir=tmp_path)
    assert Answer(merged) == expected


def wrap_limit(lab: Lab) -> int:
    """Of this process as it is: all that the test is about is that it works."""
    ACCOUNTANT.forget_all()
    return pipeload.smallest_limit(lab.folder) + 500_000_000


def test_streamed_while_merged(lab: Lab, tmp_path: Path) -> None:
    """A merged adapter streams with spill_dir; to switch it would unmerge it, and is refused."""
    adapted = lab.adapted("lora")
    adapted.merge_adapter()
    merged = Answer(adapted)
    with pytest.raises(pipeload.CheckpointError, match="spill_dir"):
        pipeload.wrap(adapted, wrap_limit(lab))
    wrap(adapted, 200_000, modules=False, spill_dir=tmp_path)
    assert Answer(adapted) == merged
    with (
        pytest.warns(UserWarning, match="merged"),
        pytest.raises(UnsupportedOperationError, match=r"unmerge\(\).*remove\(\)"),
    ):
        adapted.set_adapter("default")
    assert Answer(adapted) == merged


@pytest.mark.parametrize(
    ("name", "modules"),
    few(
        itertools.product(
            ["lora", "ia3", "saved head", "saved embedding", "prompt"], [False, True]
        ),
        [
            *((name, True) for name in ("ia3", "saved head", "saved embedding", "prompt")),
            ("lora", False),
        ],
    ),
)
def test_saving(name: str, modules: bool, lab: Lab, tmp_path: Path) -> None:
    """The adapter's file is that of a plain model, byte for byte."""
    adapted = put_on(load_streamed(lab.folder, modules=modules), lab.adapter(name))
    adapted.save_pretrained(tmp_path)
    file = "adapter_model.safetensors"
    plain = lab.adapted(name)
    plain.save_pretrained(tmp_path / "plain")
    assert (tmp_path / file).read_bytes() == (tmp_path / "plain" / file).read_bytes()
    assert Answer(put_on(lab.plain(), tmp_path)) == lab.wanted(name)
    assert Answer(adapted) == lab.wanted(name)


def test_saving_what_is_on_disk(lab: Lab, tmp_path: Path) -> None:
    """PEFT saves an embedding with an adapter of it: refused by name, and works without."""
    adapted = put_on(load_streamed(lab.folder), lab.adapter("embedding"))
    with pytest.raises(
        UnsupportedOperationError, match=r"embed_tokens\.base_layer\.weight.*on disk"
    ):
        adapted.save_pretrained(tmp_path)
    adapted.save_pretrained(tmp_path, save_embedding_layers=False)
    assert Answer(put_on(lab.plain(), tmp_path)) == lab.wanted("embedding")
    assert Answer(adapted) == lab.wanted("embedding")


TRAINED: dict[str, Callable[[], Any]] = {
    "all layers": lora,
    "the last layer": lambda: lora(layers_to_transform=[5]),
    "its last module": lambda: lora(target_modules=["down_proj"], layers_to_transform=[5]),
    "prompt": lambda: virtual(peft.PromptTuningConfig),
}


@two_grains
@pytest.mark.parametrize("name", TRAINED)
def test_training_is_refused(name: str, modules: bool, spare: int, lab: Lab) -> None:
    """Its gradient passes through weights that are gone by then; answers are right as ever."""
    model = load_streamed(lab.folder, spare=spare, modules=modules)
    adapted = peft.get_peft_model(model, TRAINED[name]())
    with pytest.raises(UnsupportedOperationError, match=r"autograd.*no_grad"):
        adapted.train()(input_ids=IDS, labels=IDS)
    assert all(parameter.grad is None for parameter in adapted.parameters())
    adapted.eval()
    assert Answer(model) == lab.wanted()


def test_the_last_block_of_a_model_without_a_head(lab: Lab) -> None:
    """Nothing behind it would notice that it is recorded."""
    model = load_streamed(lab.folder, modules=False).model
    config = lora(target_modules=["layers.5.mlp.down_proj"], task_type=None)
    adapted = peft.get_peft_model(model, config)
    with pytest.raises(UnsupportedOperationError, match=r"autograd"):
        adapted(input_ids=IDS)


# -- memory ---------------------------------------------------------------------------------------


def test_adapters_stay_and_are_counted(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is there at wrap is in the plan; its values are never on disk."""
    big = lora(r=64, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    plain = lab.plain()
    alone = wrap(lab.plain(), 0, modules=False)
    adapted = wrap(peft.get_peft_model(plain, big).eval(), 0, modules=False)
    own = [p for n, p in adapted.named_parameters() if "lora" in n]
    nbytes = sum(p.numel() * p.element_size() for p in own)
    before, after = (pipeload.handle(m).plan.pinned_bytes for m in (alone, adapted))
    assert after - before == nbytes
    for _ in range(3):
        values = [p.data_ptr() for p in own]
        logits(adapted)
        assert [p.data_ptr() for p in own] == values
        assert not any(p.isnan().any() for p in own)


def test_a_large_adapter_takes_memory_from_the_weights(smollm2_bf16: Path) -> None:
    """Put on later, it is seen in what the process holds: residents yield at the next pass."""
    gc.collect()  # what others left would take the adapter in, and nobody need yield
    ACCOUNTANT.forget_all()
    trim_heap()
    limit = pipeload.smallest_limit(smollm2_bf16) + 220_000_000
    model = pipeload.from_pretrained(smollm2_bf16, memory_limit=limit, dtype="auto")
    for _ in range(3):
        logits(model)
    before = model.pipeload.plan.resident
    config = lora(r=192, target_modules=["q_proj", "gate_proj", "up_proj", "down_proj"])
    adapted = peft.get_peft_model(model, config).eval()
    nbytes = sum(p.numel() * p.element_size() for n, p in model.named_parameters() if "lora" in n)
    assert nbytes > 150_000_000
    logits(adapted)
    # By less than the adapter takes: what others have freed in this process takes some of it in.
    assert model.pipeload.plan.resident < before - nbytes // 4
    model.pipeload.remove()


# -- what is left of a model -----------------------------------------------------------------------


def test_a_copy_of_a_module(lab: Lab) -> None:
    """It is plain: real weights, no hook, no guard, and free of the model."""
    plain, model = lab.plain(), load_streamed(lab.folder)
    for path in ("lm_head", "model.embed_tokens", "model.layers.2.mlp.up_proj"):
        original = plain.get_submodule(path)
        copied = copy.deepcopy(model.get_submodule(path))
        assert torch.equal(copied.weight, original.weight)
        assert vars(copied).keys() == vars(original).keys()
        assert not any(vars(copied)[name] for name in vars(copied) if "hooks" in name)
        assert copied.weight.data_ptr() % 64 == 0
        copied.to(torch.float16)
    assert torch.equal(logits(model), logits(plain))


def test_no_adapter_no_watch(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without adapters each kind of call is looked at once, whatever lists a model makes."""
    begun: list[int] = []
    original = EvictedWeightWatch.begin

    def begin(watch: EvictedWeightWatch) -> None:
        begun.append(1)
        original(watch)

    monkeypatch.setattr(EvictedWeightWatch, "begin", begin)
    model = load_streamed(lab.folder)
    generated(model)
    assert begun
    begun.clear()
    holder = torch.nn.Module()
    holder.model = model
    generated(model)
    assert not begun
    model.model.layers[1].mlp.extra = torch.nn.Linear(2, 2)
    generated(model)
    assert begun


def test_remove_leaves_no_trace(lab: Lab) -> None:
    """Neither on the model nor on the adapter."""
    adapted = put_on(load_streamed(lab.folder), lab.adapter("saved head"))
    logits(adapted)
    pipeload.handle(adapted).remove()
    plain = lab.adapted("saved head")
    for module, original in zip(adapted.modules(), plain.modules(), strict=True):
        extra = set(vars(module)) - set(vars(original)) - {"_weight_conversions"}
        assert extra == set(), type(module)
        for name in vars(original):
            if "hooks" in name:
                assert len(vars(module)[name]) == len(vars(original)[name]), (type(module), name)
