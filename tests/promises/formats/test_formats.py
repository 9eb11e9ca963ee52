"""Checkpoints that others have quantised: streamed as plain loads them, or refused by name.

Every method that the library knows has a row in the product's table, and every row has a test.
"""

from __future__ import annotations

import itertools
import json
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

import pipeload
from pipeload import UnsupportedModelError
from pipeload.budget import expert_banks
from pipeload.budget.shared_limit import ACCOUNTANT
from pipeload.formats.form_names import DECODED, GGUF
from pipeload.formats.format import PUT_IN_ORDER
from pipeload.formats.refused import REFUSED
from pipeload.formats.registry import FORMATS, FROM_FLOATS
from pipeload.hf import recipes, takeover
from tests.support import quantised
from tests.support.models import load_plain, save_random
from tests.support.streaming import generated, load_streamed, logits, smallest_limit, steady_floor
from tests.support.sweeps import few

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.conftest import TinyCheckpoint

pytestmark = [
    # BitNet's modules call what torch has renamed.
    pytest.mark.filterwarnings("ignore:`torch:DeprecationWarning"),
    # What the library says of an option that has the weights unpacked.
    pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning"),
    # PEFT asks for what transformers have renamed.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

METHODS = {
    "bitsandbytes" if name.startswith("bitsandbytes") else name
    for name in AUTO_QUANTIZATION_CONFIG_MAPPING
}
MAKERS: dict[str, Callable[[Path], Path]] = {
    "fp8": quantised.fp8,
    "fp8 experts": quantised.fp8_experts,
    "mxfp8": quantised.mxfp8,
    "mxfp4": quantised.mxfp4,
    "metal": quantised.metal,
    "bitnet": quantised.bitnet,
    "gemma": quantised.gemma,
    "compressed-tensors": quantised.compressed_tensors,
    "compressed-tensors experts": quantised.compressed_experts,
}
# With plain on the CPU: without these, one looks for a GPU of Apple's, the other keeps integers.
OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "metal": lambda: {"device_map": "cpu"},
    "compressed-tensors": lambda: {
        "quantization_config": transformers.CompressedTensorsConfig(dequantize=True)
    },
}
TAKEN_OVER = set(DECODED) - {found.method for found in FORMATS} - {"mlx"}  # gives no name
STREAMED = {found.method for found in FORMATS} | TAKEN_OVER


@pytest.fixture(autouse=True)
def alone() -> None:
    """No model of another test has a part in the limit."""
    ACCOUNTANT.forget_all()


@pytest.fixture(autouse=True)
def eager() -> Iterator[None]:
    """BitNet's modules compile their rounding, which takes a compiler and a minute."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A folder of each format, made once."""
    folders: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name.startswith("compressed-tensors"):
            pytest.importorskip("compressed_tensors")
            pytest.importorskip("transformers", minversion="5.24")  # unpacks while it loads
        if name == "gemma":  # releases before do not know it
            pytest.importorskip("transformers.integrations.gemma_quant")
        if name not in folders:
            folders[name] = MAKERS[name](tmp_path_factory.mktemp(name.replace(" ", "-")))
        return folders[name]

    return make


def options_of(name: str) -> dict[str, Any]:
    return OPTIONS.get(name.removesuffix(" experts"), dict)()


def plain(folder: Path, name: str, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, **({"dtype": "auto"} | options_of(name) | options)
    )


def with_config(folder: Path, target: Path, config: object) -> Path:
    """A copy of a checkpoint that says it is quantised."""
    copy = Path(shutil.copytree(folder, target / "copy"))
    stored = json.loads((copy / "config.json").read_text())
    stored["quantization_config"] = config
    (copy / "config.json").write_text(json.dumps(stored))
    return copy


def test_every_method_of_the_library_has_a_row() -> None:
    """A release that brings new ones fails here; `pipeload` is registered by the product."""
    assert STREAMED | REFUSED.keys() >= METHODS
    tested = (
        {name.split()[0] for name in MAKERS} | {"bitsandbytes", "pipeload", "gguf"} | TAKEN_OVER
    )
    assert tested == STREAMED
    assert not STREAMED & REFUSED.keys()


@pytest.mark.parametrize("name", MAKERS)
def test_streamed(name: str, made: Callable[[str], Path]) -> None:
    """Logits and greedy tokens of a plain load, at two limits, and after all is given back."""
    folder = made(name)
    reference = plain(folder, name)
    wanted, tokens = logits(reference), generated(reference)
    assert not wanted.isnan().any()
    for spare in (0, 300_000):
        model = load_streamed(folder, spare=spare, modules=True, **options_of(name))
        plan = model.pipeload.plan
        assert any(w.group or w.guarded for unit in plan.units for w in unit.streamed.weights)
        assert torch.equal(logits(model), wanted)
        assert generated(model) == tokens
        model.pipeload.remove()
        assert torch.equal(logits(model), wanted)
        assert model.dtype == reference.dtype


@pytest.mark.parametrize(
    ("name", "dtype"),
    few(
        itertools.product(["fp8", "mxfp4", "metal"], [torch.float32, torch.float16]),
        [("fp8", torch.float16), ("mxfp4", torch.float32), ("metal", torch.float16)],
    ),
)
def test_in_another_dtype(name: str, dtype: torch.dtype, made: Callable[[str], Path]) -> None:
    """What is not quantised is cast, or kept, as the library's operation does."""
    if name == "metal" and recipes._CASTS_FIRST:
        pytest.skip("plain itself makes a model of two dtypes, which cannot compute")
    folder = made(name)
    model = load_streamed(folder, dtype=dtype, **options_of(name))
    reference = plain(folder, name, dtype=dtype)
    for (path, one), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert one.dtype == other.dtype, path
    assert torch.equal(logits(model), logits(reference))


@pytest.mark.parametrize("name", ["fp8 experts", "mxfp4", "compressed-tensors experts"])
def test_experts_are_unpacked_one_by_one(
    name: str, made: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a token alone; a plain load unpacks all."""
    monkeypatch.setattr(expert_banks, "_BANK_BYTES", 1)
    folder = made(name)
    reference = plain(folder, name)
    token = torch.tensor([[7]])
    for spare in (1_000, 100_000_000):
        model = load_streamed(folder, spare=spare, modules=True, **options_of(name))
        assert torch.equal(logits(model, token), logits(reference, token))
        stats, share = model.pipeload.stats(), model.pipeload.plan.experts
        assert share is not None
        assert 0 < stats.expert_misses < share.experts
        for _ in range(2):
            assert torch.equal(logits(model), logits(reference))
        assert generated(model) == generated(reference)
        model.pipeload.remove()
        assert torch.equal(logits(model), logits(reference))


def test_experts_that_the_library_cannot_unpack(tmp_path: Path) -> None:
    """Plain loading fails, too; the name of the first weight is said."""
    pytest.importorskip("compressed_tensors")
    folder = quantised.compressed_integers(tmp_path)
    options = options_of("compressed-tensors")
    with pytest.raises(UnsupportedModelError, match=r"cannot make 'model\.layers\.0\.mlp\.experts"):
        load_streamed(folder, **options)
    with pytest.raises(RuntimeError, match="conversion of the weights"):
        plain(folder, "compressed-tensors")


@pytest.mark.parametrize("name", ["fp8", "mxfp8", "mxfp4", "metal"])
def test_large_weights_are_unpacked_piece_by_piece(
    name: str, made: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pieces are those of the whole, and take less memory at a time."""
    folder = made(name)
    pieces: list[int] = []
    part = recipes._part

    def watched(tensor: torch.Tensor, index: int, count: int) -> torch.Tensor:
        pieces.append(count)
        return part(tensor, index, count)

    with steady_floor():
        roomy = smallest_limit(folder, dtype="auto")
        monkeypatch.setattr(recipes, "_PIECE_BYTES", 3_000)
        monkeypatch.setattr(recipes, "_part", watched)
        assert smallest_limit(folder, dtype="auto") < roomy
    model = load_streamed(folder)
    assert torch.equal(logits(model), logits(plain(folder, name)))
    assert max(pieces) > 2


@pytest.mark.parametrize("name", ["fp8", "mxfp4"])
def test_wrap(name: str, made: Callable[[str], Path]) -> None:
    """A model that plain has unpacked is the checkpoint's still; one that was changed is not."""
    folder = made(name)
    model, reference = plain(folder, name), plain(folder, name)
    with steady_floor():
        limit = smallest_limit(folder, dtype="auto")
        pipeload.wrap(model, limit)
    assert pipeload.handle(model).plan.bytes_per_pass > 0
    assert torch.equal(logits(model), logits(reference))
    with torch.no_grad():
        reference.model.layers[1].self_attn.q_proj.weight[0, 0] += 1
    with pytest.raises(pipeload.CheckpointError, match=r"layers\.1\.self_attn\.q_proj"):
        pipeload.wrap(reference, limit)


@pytest.mark.parametrize("name", ["fp8", "bitnet"])
def test_with_an_adapter(name: str, made: Callable[[str], Path]) -> None:
    """The operations look at modules, which an adapter has moved."""
    peft: Any = pytest.importorskip("peft")
    folder = made(name)
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)

    def adapted(model: Any) -> Any:
        torch.manual_seed(1)
        return peft.get_peft_model(model, config)

    wanted = logits(adapted(plain(folder, name)))
    assert torch.equal(logits(adapted(load_streamed(folder))), wanted)


@pytest.mark.parametrize("method", [*sorted(REFUSED), "of-next-year", None])
def test_refused(method: str | None, tiny: TinyCheckpoint, tmp_path: Path) -> None:
    """By its name, with the reason and what to use; before the library looks for its package."""
    folder = with_config(tiny("llama"), tmp_path, {"quant_method": method})
    found = REFUSED.get(str(method))
    for load in (pipeload.from_pretrained, pipeload.plan, streamed_in_a_context):
        with pytest.raises(UnsupportedModelError) as refusal:
            load(folder)
        words = str(refusal.value)
        assert words.startswith(f"checkpoints quantised by {str(method)!r} cannot be streamed: ")
        assert words.endswith(FROM_FLOATS)
        if found is not None:
            assert found in words


def streamed_in_a_context(folder: Path) -> object:
    with pipeload.streaming("100GB"):
        return transformers.AutoModelForCausalLM.from_pretrained(folder)


def test_what_the_message_advises_works(tiny: TinyCheckpoint, tmp_path: Path) -> None:
    """The command makes a checkpoint that streams."""
    pipeload.quantize(tiny("llama"), tmp_path / "int8", method="int8")
    model = load_streamed(tmp_path / "int8")
    assert torch.equal(logits(model), logits(load_plain(tmp_path / "int8")))


@pytest.mark.parametrize("settings", [{"linear_class": "bitlinear"}, {"linear_class": None}])
def test_a_setting_that_is_not_streamed(settings: dict[str, Any], tmp_path: Path) -> None:
    """BitNet's other kind of Linear computes with what is packed."""
    folder = quantised.bitnet(tmp_path, **settings)
    words = r"'bitnet' cannot be streamed: its linear_class is .*only 'autobitlinear'"
    with pytest.raises(UnsupportedModelError, match=words):
        pipeload.from_pretrained(folder)


def test_integers_that_are_evicted(made: Callable[[str], Path]) -> None:
    """They have no NaN to show: a module that is called by itself refuses; the model goes on."""
    model = load_streamed(made("gemma"))
    wanted, one = logits(model), model.model.layers[3].mlp.up_proj
    with pytest.raises(UnsupportedModelError, match=r"layers\.3\.mlp\.up_proj.*was called while"):
        one(torch.zeros(1, one.in_features, dtype=torch.bfloat16))
    assert torch.equal(logits(model), wanted)


def test_integers_of_another_shape(tmp_path: Path) -> None:
    """The tensor is named, with what was wanted."""
    folder = quantised.gemma(tmp_path)
    name = "model.layers.1.mlp.up_proj.weight"
    file = folder / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, name: tensors[name].to(torch.float16)}, file, {"format": "pt"})
    with pytest.raises(
        pipeload.CheckpointError, match=rf"'{re.escape(name)}' .*F16.*wanted \[512, 96"
    ):
        load_streamed(folder)


def test_online_bitnet(tmp_path: Path) -> None:
    """Its weights are floats in the file; rounding is the module's."""
    kind = {"linear_class": "autobitlinear", "quantization_mode": "online"}
    config = {"quant_method": "bitnet", "modules_to_not_convert": ["lm_head"], **kind}
    folder = quantised.rewrite(save_random("llama", tmp_path, "bf16", seed=3), config)
    assert torch.equal(logits(load_streamed(folder)), logits(plain(folder, "bitnet")))


@pytest.mark.parametrize(
    ("method", "asked", "package"),
    [
        ("fp8", "quantizers.quantizer_finegrained_fp8.is_accelerate_available", "accelerate"),
        ("mxfp4", "quantizers.quantizer_mxfp4.is_accelerate_available", "accelerate"),
        ("bitnet", "quantizers.quantizer_bitnet.is_accelerate_available", "accelerate"),
        ("bitsandbytes", "quantizers.quantizer_bnb_8bit.is_bitsandbytes_available", "bitsandbytes"),
        (
            "compressed-tensors",
            "utils.quantization_config.is_compressed_tensors_available",
            "compressed-tensors",
        ),
    ],
)
def test_a_package_that_is_missing(
    method: str, asked: str, package: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Named in one error of our own, with another way."""
    tiny: TinyCheckpoint = request.getfixturevalue("tiny")
    patch: pytest.MonkeyPatch = request.getfixturevalue("monkeypatch")
    patch.setattr(f"transformers.{asked}", lambda *_: False)
    settings = {"load_in_8bit": True, "linear_class": "autobitlinear", "quant_method": method}
    if method != "bitsandbytes":
        del settings["load_in_8bit"]
    folder = with_config(tiny("llama"), tmp_path, settings)
    words = rf"quantised by '{method}' cannot be streamed here: .*{package}.*pipeload quantize"
    with pytest.raises(UnsupportedModelError, match=words):
        pipeload.from_pretrained(folder)


def test_weights_that_stay_packed(
    made: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: refused where the CPU computes with them, too, and else unpacked."""
    folder = made("fp8")
    quantizer = "transformers.quantizers.quantizer_finegrained_fp8.FineGrainedFP8HfQuantizer"
    monkeypatch.setattr(f"{quantizer}.validate_environment", lambda *_args, **_kwargs: None)
    words = r"FineGrainedFP8Config\(dequantize=True\)"
    with pytest.raises(UnsupportedModelError, match=words):
        pipeload.from_pretrained(folder)
    explicit = transformers.FineGrainedFP8Config(dequantize=True)
    wanted = logits(plain(folder, "fp8", quantization_config=explicit))
    assert torch.equal(logits(load_streamed(folder, quantization_config=explicit)), wanted)
    monkeypatch.setattr(takeover, "_has_accelerator", lambda: True)
    assert torch.equal(logits(load_streamed(folder)), wanted)


def test_plain_loading_beside_it(tiny: TinyCheckpoint, tmp_path: Path) -> None:
    """What is refused here is the library's to answer everywhere else."""
    folder = with_config(tiny("llama"), tmp_path, {"quant_method": "gptq", "bits": 4})
    with pytest.raises(UnsupportedModelError):
        pipeload.from_pretrained(folder)
    with pytest.raises((ImportError, RuntimeError)) as error:
        transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert not isinstance(error.value, pipeload.PipeloadError)


def test_the_table_of_formats() -> None:
    """Each format stands there once, with what the product's table says of it."""
    page = Path(__file__).parents[3] / "docs" / "quantised-models.md"
    text = page.read_text(encoding="utf-8")
    for row in rows():
        assert text.count(f"{row}\n") == 1, row


def rows() -> list[str]:
    """The table in docs/quantised-models.md, a line for each format."""
    lines = []
    for one in FORMATS:
        only = f" (`{one.only[0]}`: `{one.only[1]}`)" if one.only else ""
        made = one.unpacking
        packed = made is not None and made.packed_on_cpu
        needs = f"pass `{made.config}(dequantize=True)`" if made and packed else "-"
        if one.method in {*DECODED, GGUF}:
            needs = (
                f"4 and 8 bits as `gptq`; floats: {needs}" if packed else "also `pipeload convert`"
            )
        lines.append(f"| `{one.method}`{only} | streamed: {one.how} | {needs} |")
    lines += [
        f"| `{method}` | streamed: {PUT_IN_ORDER} | also `pipeload convert` |"
        for method in (*sorted(TAKEN_OVER - {"aqlm"}), "mlx")
    ]
    how = "read as it is stored, and unpacked to floats each time"
    lines.append(f"| `aqlm` | streamed: {how} | - |")
    for method, why in REFUSED.items():
        advised = "`pipeload quantize` of the floats"
        lines.append(f"| `{method}` | refused: {why} | {advised} |")
    return lines
