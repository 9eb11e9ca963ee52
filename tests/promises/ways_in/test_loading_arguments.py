"""Every argument of the library's from_pretrained: served as plain serves it, or refused in words.

Each row of the table below goes through `pipeload.from_pretrained`, `pipeload.plan` and a plain
`from_pretrained` inside `pipeload.streaming`.
"""

from __future__ import annotations

import json
import re
import shutil
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    GenerationConfig,
    LlamaForCausalLM,
    modeling_utils,
)
from transformers.utils import hub

import pipeload
from pipeload import CheckpointError, MemoryLimitError, OptionError, UnsupportedModelError
from tests.support.models import random_model, save_random, tiny_config
from tests.support.streaming import FLOOR_BYTES, logits, steady_floor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PAGE = Path(__file__).resolve().parents[3] / "docs" / "api.md"
ROOMY = 2 * FLOOR_BYTES
DISK = {
    "model.embed_tokens": "cpu",
    "model.layers": "disk",
    "model.norm": "cpu",
    "model.rotary_emb": "cpu",
    "lm_head": "disk",
}


class Source(NamedTuple):
    """What a row loads: with a folder of its own, or arguments that only exist then."""

    pretrained: str | Path
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class Row:
    """One way of passing one argument."""

    argument: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    make: Callable[[Path, Path], Source] | None = None
    """Makes a source of its own from the common folder and an empty one."""
    error: type[Exception] | None = None
    """What pipeload raises."""
    words: str = ""
    plain: dict[str, Any] | None = None
    """What plain is given instead where it refuses what is served here."""
    as_plain: bool = False
    """Plain raises the same error: it is the library's to judge."""
    kind: Any = AutoModelForCausalLM
    """Whose `from_pretrained` is called."""

    def source(self, folder: Path, empty: Path) -> Source:
        return self.make(folder, empty) if self.make else Source(folder, self.kwargs)


# -- sources of their own --------------------------------------------------------------------------


def other_weights(folder: Path) -> Path:
    """A checkpoint of the same shape, so that loading the wrong one shows."""
    return save_random("llama", folder, "bf16", seed=8)


def in_a_subfolder(folder: Path, empty: Path) -> Source:
    other_weights(empty)
    shutil.copytree(folder, empty / "inner")
    return Source(empty, {"subfolder": "inner"})


def a_variant(_folder: Path, empty: Path) -> Source:
    other_weights(empty)
    model = random_model(tiny_config("llama"), torch.float16, seed=9)
    model.save_pretrained(empty, variant="fp16", max_shard_size="200KB")
    assert (empty / "model.safetensors.index.fp16.json").exists()
    return Source(empty, {"variant": "fp16"})


def hub_cache(folder: Path, empty: Path) -> tuple[Path, str, str]:
    """What a download leaves: two commits, `main` and a branch `other`, as links into blobs."""
    repository = empty / "models--someone--tiny"
    commits = {"main": "a" * 40, "other": "b" * 40}
    (repository / "refs").mkdir(parents=True)
    blobs = repository / "blobs"
    blobs.mkdir()
    second = other_weights(empty.with_name(empty.name + "-other"))
    for (name, commit), origin in zip(commits.items(), (folder, second), strict=True):
        (repository / "refs" / name).write_text(commit)
        snapshot = repository / "snapshots" / commit
        snapshot.mkdir(parents=True)
        for file in origin.iterdir():
            blob = blobs / f"{commit[:4]}{file.name}"
            shutil.copy(file, blob)
            (snapshot / file.name).symlink_to(Path("../../blobs") / blob.name)
    return empty, commits["main"], commits["other"]


def by_id(**kwargs: Any) -> Callable[[Path, Path], Source]:
    def make(folder: Path, empty: Path) -> Source:
        cache, _, _ = hub_cache(folder, empty)
        return Source("someone/tiny", {"cache_dir": cache, "local_files_only": True, **kwargs})

    return make


def by_commit(folder: Path, empty: Path) -> Source:
    cache, _, other = hub_cache(folder, empty)
    return Source("someone/tiny", {"cache_dir": str(cache), "revision": other})


def renamed_keys(folder: Path, empty: Path) -> Source:
    """As published by somebody with names of their own."""
    from safetensors.torch import load_file, save_file

    weights: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        weights.update(load_file(file))
    renamed = {name.replace("model.layers", "body.stages"): w for name, w in weights.items()}
    save_file(renamed, empty / "model.safetensors", {"format": "pt"})
    shutil.copy(folder / "config.json", empty)
    return Source(empty, {"key_mapping": {r"^body\.stages": "model.layers"}})


CODE = """
from transformers import LlamaConfig, LlamaForCausalLM


class OwnConfig(LlamaConfig):
    model_type = "own"


class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = 2 * output.logits
        return output
"""


def with_code(*, trusted: bool) -> Callable[[Path, Path], Source]:
    def make(folder: Path, empty: Path) -> Source:
        copy = shutil.copytree(folder, empty / "model")
        (copy / "modeling_own.py").write_text(CODE)
        config = json.loads((copy / "config.json").read_text())
        config["model_type"] = "own"
        names = {"AutoConfig": "OwnConfig", "AutoModelForCausalLM": "OwnModel"}
        config["auto_map"] = {auto: f"modeling_own.{own}" for auto, own in names.items()}
        (copy / "config.json").write_text(json.dumps(config))
        return Source(copy, {"trust_remote_code": trusted})

    return make


def with_an_adapter(folder: Path, empty: Path) -> Source:
    """A LoRA that lies in a folder below its base model."""
    peft: Any = pytest.importorskip("peft")
    base = shutil.copytree(folder, empty / "base")
    torch.manual_seed(3)
    options = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model: Any = AutoModelForCausalLM.from_pretrained(base)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks for what is renamed by now
        peft.get_peft_model(model, options).save_pretrained(base / "lora")
    return Source(base, {"adapter_kwargs": {"subfolder": "lora"}})


def another_config(folder: Path, _empty: Path) -> Source:
    config = transformers.AutoConfig.from_pretrained(folder)
    config.num_hidden_layers = 4
    return Source(folder, {"config": config})


def config_by_path(folder: Path, empty: Path) -> Source:
    config = transformers.AutoConfig.from_pretrained(folder)
    config.rms_norm_eps = 0.1
    config.save_pretrained(empty)
    return Source(folder, {"config": str(empty)})


def other_vocabulary(folder: Path, _empty: Path) -> Source:
    config = transformers.AutoConfig.from_pretrained(folder)
    config.vocab_size = 520
    return Source(folder, {"config": config, "ignore_mismatched_sizes": True})


def mismatched(folder: Path, empty: Path) -> Source:
    pretrained, kwargs = other_vocabulary(folder, empty)
    return Source(pretrained, {**kwargs, "ignore_mismatched_sizes": False})


# -- the table -------------------------------------------------------------------------------------

PLACED = "device_map puts modules on {}; pipeload places weights itself.*Leave device_map out"
QUANTISED = "quantises weights while they are loaded.*Leave it out"
SPREAD = "spreads a model over several processes.*Leave it out"
_4BIT = BitsAndBytesConfig(load_in_4bit=True)


def placed(place: str, device_map: Any) -> Row:
    return Row(
        "device_map", {"device_map": device_map}, error=OptionError, words=PLACED.format(place)
    )


def quantised(argument: str, value: Any) -> Row:
    return Row(argument, {argument: value}, error=UnsupportedModelError, words=QUANTISED)


def spread(argument: str, value: Any) -> Row:
    return Row(argument, {argument: value}, error=OptionError, words=f"{argument}=.*{SPREAD}")


ROWS = {
    "device_map auto": Row("device_map", {"device_map": "auto"}),
    "device_map balanced": Row("device_map", {"device_map": "balanced"}),
    "device_map balanced_low_0": Row("device_map", {"device_map": "balanced_low_0"}),
    "device_map sequential": Row("device_map", {"device_map": "sequential"}),
    "device_map cpu": Row("device_map", {"device_map": "cpu"}),
    "device_map device": Row("device_map", {"device_map": torch.device("cpu")}),
    "device_map dict": Row("device_map", {"device_map": {"": torch.device("cpu", 0)}}),
    "device_map disk": Row(
        "device_map",
        make=lambda folder, empty: Source(folder, {"device_map": DISK, "offload_folder": empty}),
    ),
    "device_map cuda": placed("cuda", "cuda"),
    "device_map cuda:1": placed("cuda:1", {"model": "cpu", "lm_head": "cuda:1"}),
    "device_map cuda device": placed("cuda", {"": torch.device("cuda")}),
    "device_map 0": placed("0", 0),
    "device_map dict of 0": placed("0", {"": 0}),
    "device_map mps": placed("mps", "mps"),
    "device_map meta": placed("meta", "meta"),
    "device_map unknown": placed("everywhere", "everywhere"),
    "max_memory": Row("max_memory", {"device_map": "auto", "max_memory": {"cpu": "1GB"}}),
    "max_memory small": Row(
        "max_memory",
        make=lambda folder, empty: Source(
            folder,
            {"device_map": "auto", "max_memory": {"cpu": 300_000}, "offload_folder": str(empty)},
        ),
    ),
    "offload_folder": Row("offload_folder", {"offload_folder": "nowhere"}),
    "offload_buffers": Row("offload_buffers", {"offload_buffers": True}),
    "offload_state_dict": Row("offload_state_dict", {"offload_state_dict": True}),
    "low_cpu_mem_usage": Row("low_cpu_mem_usage", {"low_cpu_mem_usage": True}),
    "low_cpu_mem_usage off": Row("low_cpu_mem_usage", {"low_cpu_mem_usage": False}),
    "dtype auto": Row("dtype", {"dtype": "auto"}),
    "dtype": Row("dtype", {"dtype": torch.float32}),
    "dtype text": Row("dtype", {"dtype": "float16"}),
    "dtype unknown": Row("dtype", {"dtype": "float17"}, error=AttributeError, as_plain=True),
    "torch_dtype auto": Row("torch_dtype", {"torch_dtype": "auto"}),
    "torch_dtype": Row("torch_dtype", {"torch_dtype": torch.float32}),
    "torch_dtype text": Row("torch_dtype", {"torch_dtype": "float32"}),
    "dtype first": Row("torch_dtype", {"torch_dtype": "float32", "dtype": "float16"}),
    "load_in_4bit": quantised("load_in_4bit", True),
    "load_in_4bit off": Row("load_in_4bit", {"load_in_4bit": False}, plain={}),
    "load_in_8bit": quantised("load_in_8bit", True),
    "load_in_8bit off": Row("load_in_8bit", {"load_in_8bit": False}, plain={}),
    "quantization_config": quantised("quantization_config", _4BIT),
    "quantization_config dict": quantised(
        "quantization_config", {"quant_method": "bitsandbytes", "load_in_8bit": True}
    ),
    "quantization_config unknown": Row(
        "quantization_config",
        {"quantization_config": {"quant_method": "x"}},
        error=ValueError,
        as_plain=True,
    ),
    "quantization_config none": Row("quantization_config", {"quantization_config": None}),
    "attn_implementation eager": Row("attn_implementation", {"attn_implementation": "eager"}),
    "attn_implementation sdpa": Row("attn_implementation", {"attn_implementation": "sdpa"}),
    "attn_implementation unknown": Row(
        "attn_implementation", {"attn_implementation": "no"}, error=ValueError, as_plain=True
    ),
    "experts_implementation": Row(
        "experts_implementation", {"experts_implementation": "batched_mm"}
    ),
    "use_safetensors": Row("use_safetensors", {"use_safetensors": True}),
    "use_safetensors off": Row(
        "use_safetensors",
        {"use_safetensors": False},
        error=CheckpointError,
        words="use_safetensors=False asks for pickled weights",
    ),
    "weights_only": Row("weights_only", {"weights_only": False}),
    "disable_mmap": Row("disable_mmap", {"disable_mmap": True}),
    "disable_mmap off": Row("disable_mmap", {"disable_mmap": False}),
    "gguf_file": Row(
        "gguf_file",
        {"gguf_file": "model.gguf"},
        error=CheckpointError,
        words="model.gguf.*does not exist",
        kind=LlamaForCausalLM,  # the auto class would look at the file first
    ),
    "state_dict": Row(
        "state_dict",
        {"state_dict": {"lm_head.weight": torch.ones(1)}},
        error=OptionError,
        words="state_dict= cannot be streamed",
    ),
    "config": Row("config", make=another_config),
    "config by path": Row("config", make=config_by_path, kind=LlamaForCausalLM),
    "generation_config": Row(
        "generation_config", {"generation_config": GenerationConfig(max_new_tokens=3)}
    ),
    "a value of the configuration": Row("any value of the configuration", {"rms_norm_eps": 0.1}),
    "an unknown argument": Row(
        "any value of the configuration", {"no_such": 1}, error=TypeError, as_plain=True
    ),
    "variant": Row("variant", make=a_variant),
    "variant missing": Row(
        "variant", {"variant": "int3"}, error=CheckpointError, words=r"model\.int3\.safetensors"
    ),
    "subfolder": Row("subfolder", make=in_a_subfolder),
    "subfolder missing": Row("subfolder", {"subfolder": "no"}, error=ValueError, as_plain=True),
    "key_mapping": Row("key_mapping", make=renamed_keys),
    "ignore_mismatched_sizes": Row("ignore_mismatched_sizes", make=other_vocabulary),
    "ignore_mismatched_sizes off": Row(
        "ignore_mismatched_sizes", make=mismatched, error=RuntimeError, as_plain=True
    ),
    "output_loading_info": Row("output_loading_info", {"output_loading_info": True}),
    "trust_remote_code": Row("trust_remote_code", make=with_code(trusted=True)),
    "trust_remote_code off": Row(
        "trust_remote_code", make=with_code(trusted=False), error=ValueError, as_plain=True
    ),
    "code_revision": Row("code_revision", {"code_revision": "main"}),
    "adapter_kwargs": Row("adapter_kwargs", make=with_an_adapter),
    "adapter_kwargs empty": Row("adapter_kwargs", {"adapter_kwargs": {}}),
    "cache_dir": Row("cache_dir", make=by_id()),
    "local_files_only": Row("local_files_only", {"local_files_only": True}),
    "revision branch": Row("revision", make=by_id(revision="other")),
    "revision commit": Row("revision", make=by_commit),
    "revision missing": Row("revision", make=by_id(revision="third"), error=OSError, as_plain=True),
    "token": Row("token", make=by_id(token="hf_none")),
    "token off": Row("token", {"token": False}),
    "force_download": Row("force_download", {"force_download": True}),
    "proxies": Row("proxies", {"proxies": {"https": "nowhere:1"}}),
    "tp_plan": spread("tp_plan", "auto"),
    "tp_size": spread("tp_size", 2),
    "device_mesh": spread("device_mesh", object()),
    "distributed_config": spread("distributed_config", {"tp_size": 2}),
    "use_kernels": Row("use_kernels", {"use_kernels": False}),
}


# -- how they are tried ----------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def surroundings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Every plan starts from the same floor; code of checkpoints is copied where it is deleted."""
    from transformers import dynamic_module_utils

    modules = str(tmp_path_factory.mktemp("modules"))
    with pytest.MonkeyPatch.context() as patch, steady_floor():
        patch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", modules)
        patch.syspath_prepend(modules)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In several files, so that an index is read, too."""
    folder = tmp_path_factory.mktemp("arguments")
    return save_random("llama", folder, "bf16", seed=7, max_shard_size="200KB")


def plainly(row: Row, source: Source) -> Any:
    torch.manual_seed(5)  # what is not loaded is random
    return row.kind.from_pretrained(source.pretrained, **source.kwargs)


def streamed(row: Row, source: Source, limit: int) -> Any:
    torch.manual_seed(5)
    return pipeload.from_pretrained(
        source.pretrained, memory_limit=limit, auto_class=row.kind, **source.kwargs
    )


def in_a_context(row: Row, source: Source, limit: int) -> Any:
    with pipeload.streaming(limit):
        return plainly(row, source)


def planned(row: Row, source: Source, limit: int) -> pipeload.Plan:
    return pipeload.plan(
        source.pretrained, memory_limit=limit, auto_class=row.kind, **source.kwargs
    )


SERVED = [name for name, row in ROWS.items() if row.error is None]
REFUSED = [name for name, row in ROWS.items() if row.error is not None]


@pytest.mark.parametrize("name", SERVED)
def test_served(name: str, folder: Path, tmp_path: Path) -> None:
    """The streamed model gives what the plain one gives that was loaded with the same argument."""
    row = ROWS[name]
    source = row.source(folder, tmp_path)
    with pytest.raises(MemoryLimitError) as refusal:
        planned(row, source, 1)
    limit = refusal.value.smallest_limit
    wanted = plainly(row, source if row.plain is None else Source(folder, row.plain))
    there = sorted(tmp_path.rglob("*"))
    for load in (streamed, in_a_context):
        got = load(row, source, limit)
        assert sorted(tmp_path.rglob("*")) == there  # no copy is written
        if isinstance(wanted, tuple):
            assert got[1] == wanted[1]
            assert_alike(got[0], wanted[0])
            got = got[0]
        else:
            assert_alike(got, wanted)
        made = got.pipeload.plan
        got.pipeload.remove()
        assert planned(row, source, limit).bytes_per_pass == made.bytes_per_pass > 0


def assert_alike(got: Any, wanted: Any) -> None:
    assert type(got) is type(wanted)
    assert got.dtype == wanted.dtype
    assert got.config.to_dict() == wanted.config.to_dict()
    assert got.generation_config.to_dict() == wanted.generation_config.to_dict()
    for choice in ("_attn_implementation", "_experts_implementation"):
        assert getattr(got.config, choice) == getattr(wanted.config, choice)
    assert not hasattr(got, "hf_device_map")  # PEFT and pipelines would move the model by it
    assert torch.equal(logits(got), logits(wanted))


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("load", [streamed, in_a_context, planned])
def test_refused(name: str, load: Any, folder: Path, tmp_path: Path) -> None:
    """One error that names the argument, before a weight is read; or the library's own, as is."""
    row = ROWS[name]
    assert row.error is not None
    source = row.source(folder, tmp_path)
    words = row.words
    if row.as_plain:
        with pytest.raises(row.error) as plain:
            plainly(row, source)
        words = re.escape(str(plain.value))
    # Weights of another shape are the library's to find while it loads, and a plan loads none.
    if load is planned and name == "ignore_mismatched_sizes off":
        assert planned(row, source, ROOMY)
        return
    with pytest.raises(row.error, match=words):
        load(row, source, ROOMY)
    assert not hasattr(AutoModelForCausalLM.from_pretrained(folder), "pipeload")


@pytest.mark.parametrize(
    "name", ["subfolder", "variant", "revision branch", "revision commit", "config by path"]
)
def test_rows_change_something(name: str, folder: Path, tmp_path: Path) -> None:
    """What is compared above would be equal if the argument were lost: not here."""
    row = ROWS[name]
    source = row.source(folder, tmp_path)
    without = {key: value for key, value in source.kwargs.items() if key != row.argument}
    with_it, usual = plainly(row, source), plainly(row, Source(source.pretrained, without))
    assert not torch.equal(logits(with_it), logits(usual))


def asked_of_the_hub(load: Callable[[], Any]) -> list[dict[str, Any]]:
    """What its client is called with. It finds everything in the cache: there is no hub here."""
    calls: list[dict[str, Any]] = []

    def recorded(name: str, answer: Callable[..., Any]) -> Callable[..., Any]:
        def ask(*args: Any, **options: Any) -> Any:
            kept = {key: value for key, value in options.items() if key not in NOT_THE_USERS}
            calls.append({"function": name, "args": args, **kept})
            found = {"force_download": False, "local_files_only": True, "proxies": None}
            return answer(*args, **(options | found))

        return ask

    with pytest.MonkeyPatch.context() as patch:
        for module in (hub, modeling_utils):  # or everything would be `local_files_only`
            patch.setattr(module, "is_offline_mode", lambda: False)
        for name in ("hf_hub_download", "snapshot_download"):
            patch.setattr(hub, name, recorded(name, getattr(hub, name)))
        load()
    return calls


NOT_THE_USERS = ("user_agent", "tqdm_class")  # the first has a number of the session's in it
# Everything is asked for again with `force_download`, and little without.
HUB: dict[str, dict[str, Any]] = {
    "token": {"token": "hf_none", "force_download": True},
    "force_download": {"force_download": True},
    "proxies": {"proxies": {"https": "nowhere:1"}, "force_download": True},
    "local_files_only": {"local_files_only": True},
    "revision": {"revision": "b" * 40, "force_download": True},
    "cache_dir": {"force_download": True},
}


@pytest.mark.parametrize("argument", HUB)
def test_what_the_hub_is_asked(argument: str, folder: Path, tmp_path: Path) -> None:
    """The same files, in the same way, with what the user passed."""
    cache, _, _ = hub_cache(folder, tmp_path)
    row = Row(argument, kind=LlamaForCausalLM)
    source = Source("someone/tiny", {"cache_dir": str(cache), **HUB[argument]})
    wanted = asked_of_the_hub(lambda: plainly(row, source))
    for load in (streamed, in_a_context, planned):
        asked = asked_of_the_hub(lambda: load(row, source, ROOMY))  # noqa: B023 - called at once
        assert asked
        assert all(call[argument] == source.kwargs[argument] for call in asked)
        assert asked == wanted[: len(asked)]
        assert len(asked) == len(wanted) or load is planned


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
def test_a_checkpoint_that_is_quantised(folder: Path, tmp_path: Path) -> None:
    """What is passed for it is merged with its own, as plain does."""
    pytest.importorskip("bitsandbytes")
    config = BitsAndBytesConfig(load_in_8bit=True)
    AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config, dtype=torch.float16
    ).save_pretrained(tmp_path)
    row = Row("quantization_config")
    source = Source(tmp_path, {"quantization_config": config})
    with pytest.raises(MemoryLimitError) as refusal:
        planned(row, source, 1)
    for load in (streamed, in_a_context):
        model = load(row, source, refusal.value.smallest_limit)
        assert model.pipeload.plan.bytes_per_pass > 0
        assert torch.equal(logits(model), logits(plainly(row, source)))
        model.pipeload.remove()


def test_disable_mmap_maps_nothing(folder: Path, tmp_path: Path) -> None:
    """A model that fits is mapped as a rule; then it is read into memory of its own."""
    row = ROWS["disable_mmap"]
    models = []
    for disable_mmap in (False, True):
        copy = shutil.copytree(folder, tmp_path / str(disable_mmap))
        model = streamed(row, Source(copy, {"disable_mmap": disable_mmap}), ROOMY)
        assert model.pipeload.plan.bytes_per_pass == 0
        assert (model.pipeload.plan.io_mode == "mapped") is not disable_mmap
        models.append(model)
    assert torch.equal(*map(logits, models))
    mapped = Path("/proc/self/maps").read_text()
    assert f"{tmp_path}/False/" in mapped
    assert f"{tmp_path}/True/" not in mapped


def test_the_page_says_what_each_means() -> None:
    """Its table has the arguments that are tried here, and no others."""
    text = PAGE.read_text(encoding="utf-8")
    section = text.partition("\n## Loading arguments\n")[2].partition("\n## ")[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("|")][2:]
    listed = [name for cell in cells for name in re.findall(r"`(\w+)`", cell) or [cell.strip()]]
    assert len(listed) == len(set(listed))
    assert set(listed) == {row.argument for row in ROWS.values()}
