"""`pipeload eval`: the perplexity that a plain loop gives, whatever the limit and the batches."""

from __future__ import annotations

import itertools
import json
import math
import shutil
import signal
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

import pipeload
from pipeload.cli import progress_bar
from pipeload.evaluate import perplexity
from pipeload.evaluate.text_windows import (
    Window,
    choose_batch,
    default_stride,
    default_window,
    groups,
    slide,
)
from tests.support.commands import WORDS, invoke, save_tokenizer, start
from tests.support.commands import loud_libraries as loud_libraries  # noqa: PLC0414 - a fixture
from tests.support.models import load_plain, save_random, tiny_config
from tests.support.streaming import smallest_limit, steady_floor
from tests.support.sweeps import few

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.conftest import TinyCheckpoint

LICENSE = Path(__file__).resolve().parents[3] / "LICENSE"


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random fp32 model with a tokenizer."""
    folder = tmp_path_factory.mktemp("reader")
    save_random("llama", folder, "fp32", seed=3)
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another one with the same tokenizer, in bf16."""
    folder = tmp_path_factory.mktemp("other")
    save_random("qwen3", folder, "bf16", seed=4)
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One whose tokenizer makes other tokens of the same words."""
    folder = tmp_path_factory.mktemp("foreign")
    save_random("llama", folder, "fp32", seed=3)
    save_tokenizer(folder, reverse=True)
    return folder


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Fifty words."""
    file = tmp_path / "text.txt"
    file.write_text(" ".join(WORDS) + "\n")
    return file


def measured(*arguments: object) -> dict[str, Any]:
    """What `eval --json` prints of its first model."""
    result = invoke("eval", *arguments, "--json")
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    figures: dict[str, Any] = json.loads(result.stdout)["models"][0]
    return figures


@torch.no_grad()
def plain_nats(model: Any, ids: torch.Tensor, window: int, stride: int) -> tuple[float, int]:
    """The loop that one writes by hand: labels hide what was scored; the loss is a mean."""
    total, count, seen = 0.0, 0, 0
    for begin in range(0, len(ids), stride):
        end = min(begin + window, len(ids))
        inputs = ids[None, begin:end]
        labels = inputs.clone()
        labels[:, : seen - begin] = -100
        scored = int((labels[:, 1:] != -100).sum())
        if scored:
            total += float(model(inputs, labels=labels).loss) * scored
            count += scored
        seen = end
        if end == len(ids):
            break
    return total, count


# -- windows -------------------------------------------------------------------------------------


def test_what_is_taken_where_nobody_says() -> None:
    """Half of a window is context; a model's positions are all that it can see."""
    assert [default_window(positions) for positions in (100, 1024, 32768)] == [100, 1024, 1024]
    assert [default_stride(window) for window in (1024, 3, 1)] == [512, 1, 1]


@given(tokens=st.integers(0, 300), window=st.integers(2, 80), data=st.data())
def test_every_token_is_scored_once_with_context(
    tokens: int, window: int, data: st.DataObject
) -> None:
    """All but the first, after window - stride others at least; none twice, none left out."""
    stride = data.draw(st.integers(1, window))
    windows = slide(tokens, window=window, stride=stride)
    scored = [index for one in windows for index in range(one.first, one.end)]
    # With no overlap, the first of each window has no context.
    lost = set(range(0, tokens, stride)) if stride == window else {0}
    assert scored == [index for index in range(tokens) if index not in lost]
    for one in windows:
        assert 2 <= one.tokens <= window
        assert one.first - one.begin >= min(one.first, max(1, window - stride))
    assert [one for group in groups(windows) for one in group] == windows
    assert all(len({(w.tokens, w.scored) for w in group}) == 1 for group in groups(windows))


@pytest.mark.parametrize(
    ("bytes_read", "expected"),
    [
        ([0, 0, 0, 0, 0, 0, 0, 0, 0], 1),  # nothing is read: the least memory
        ([9, 9, 9, 9, 9, 9, 9, 9, 9], 9),  # a pass costs the same for all
        ([9, 9, 9, 9, 9, None, None, None, None], 5),  # 5 and 4, not 8 and 1
        ([0, 9, 9, 9, 9, 9, 9, 9, 9], 1),  # it fits with one window only
        ([1, 2, 4, 8, 16, 32, 64, 128, 256], 1),  # room for windows costs more than it saves
        ([None] * 9, 1),
    ],
)
def test_the_batch_that_reads_least(bytes_read: list[int | None], expected: int) -> None:
    """Nine windows."""
    assert choose_batch(9, 100, lambda batch: bytes_read[batch - 1]) == expected
    assert choose_batch(9, 0, lambda batch: bytes_read[batch - 1]) == 1


# -- values --------------------------------------------------------------------------------------

SLIDES = [(16, 8), (16, 16), (16, 1), (16, 15), (2, 1), (2, 2), (7, 7), (49, 1), (50, 50), (200, 9)]


@pytest.mark.parametrize(("window", "stride"), few(SLIDES, SLIDES[::2]))
def test_equal_to_a_plain_loop(reader: Path, text: Path, window: int, stride: int) -> None:
    """Edges of windows and strides: the value and the number of tokens."""
    ids = torch.tensor([int(word[1:]) for word in WORDS])
    nats, count = plain_nats(load_plain(reader), ids, window, stride)
    figures = measured(reader, "--text", text, "--window", window, "--stride", stride)
    assert figures["tokens_scored"] == count
    assert figures["perplexity"] == pytest.approx(math.exp(nats / count), rel=1e-6)


@pytest.mark.parametrize("family", ["gpt2", "gemma3", "opt"])
def test_other_families(family: str, tmp_path: Path, text: Path) -> None:
    """Learned positions, sliding layers, another call."""
    save_random(family, tmp_path, "fp32", seed=5)
    save_tokenizer(tmp_path)
    ids = torch.tensor([int(word[1:]) for word in WORDS])
    nats, count = plain_nats(load_plain(tmp_path), ids, 20, 10)
    figures = measured(tmp_path, "--text", text, "--window", 20, "--stride", 10)
    assert figures["perplexity"] == pytest.approx(math.exp(nats / count), rel=1e-6)


@pytest.mark.slow
def test_the_real_model(smollm2_bf16: Path) -> None:
    """SmolLM2 on English, cast to fp32: the plain loss's perplexity, and bits per byte."""
    content = LICENSE.read_text(encoding="utf-8")
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(smollm2_bf16)
    ids = tokenizer(content, return_tensors="pt", verbose=False).input_ids[0, :200]
    plain = load_plain(smollm2_bf16, dtype=torch.float32)
    nats, count = plain_nats(plain, ids, 96, 48)
    options = ("--window", 96, "--stride", 48, "--max-tokens", 200, "--dtype", "fp32")
    figures = measured(smollm2_bf16, "--text", LICENSE, *options)
    assert count == 199
    assert figures["perplexity"] == pytest.approx(math.exp(nats / count), rel=1e-6)
    scored = len(tokenizer.decode(ids[1:]).encode())
    assert figures["text_bytes_scored"] == scored
    assert figures["bits_per_byte"] == pytest.approx(nats / math.log(2) / scored, rel=1e-6)
    assert figures["weights"] == sum(parameter.numel() for parameter in plain.parameters())
    assert figures["bytes_per_weight"] == 2.0  # of the checkpoint, not of memory
    assert 2 < figures["perplexity"] < 40  # it has learned English


@pytest.mark.slow
def test_a_small_limit_changes_nothing(smollm2_bf16: Path) -> None:
    """Streamed at about the smallest limit, the value is that of all in memory, bit for bit."""
    options = ("--text", LICENSE, "--window", 12, "--stride", 6, "--max-tokens", 42)
    rest = (*options, "--batch", 3)
    with steady_floor(modules=True):
        limit = smallest_limit(smollm2_bf16, dtype="auto", tokens=256, batch=3) + 20_000_000
        small = measured(smollm2_bf16, *rest, "--memory-limit", limit)
        large = measured(smollm2_bf16, *rest, "--memory-limit", "20GB")
        chosen = measured(smollm2_bf16, *options, "--memory-limit", limit)
    assert small["perplexity"] == large["perplexity"]
    assert small["bits_per_byte"] == large["bits_per_byte"]
    assert (small["passes"], small["windows"], small["windows_per_pass"]) == (3, 6, 3)
    assert small["bytes_read"] > 1.5 * small["weight_bytes"] > large["bytes_read"]
    # Left to itself, one that streams takes several windows at once, and reads less for it.
    assert chosen["windows_per_pass"] > 1
    assert chosen["bytes_read"] <= small["bytes_read"]
    # Products of other sizes round otherwise in bf16, on some processors more than on others.
    assert chosen["perplexity"] == pytest.approx(small["perplexity"], rel=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "at_least"), [("int8", 1.0), ("int4", 0.5)])
def test_quantised_by_pipeload(method: str, at_least: float, tmp_path: Path, text: Path) -> None:
    """Packed weights count as many as they stand for, and what goes with them not at all."""
    sizes = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4}
    config = tiny_config("llama", num_key_value_heads=2, **sizes)
    floats = save_random(config, tmp_path / "float", "bf16", seed=6)
    save_tokenizer(floats)
    made = pipeload.quantize(floats, tmp_path / "made", method=method)
    assert measured(floats, "--text", text)["weights"] == measured(made, "--text", text)["weights"]
    assert at_least < measured(made, "--text", text)["bytes_per_weight"] < 1.3 * at_least + 0.1


@pytest.mark.slow
def test_quantised(tmp_path: Path) -> None:
    """Bytes per weight are those of the files; LLM.int8 runs window by window unless told."""
    pytest.importorskip("bitsandbytes")
    # Whole blocks of 64 in each matrix, and no matrix too small to stream.
    sizes = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4}
    config = tiny_config("llama", num_key_value_heads=2, **sizes)
    save_random(config, tmp_path / "float", "bf16", seed=6)
    for form, options in {"4": {"load_in_4bit": True}, "8": {"load_in_8bit": True}}.items():
        transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "float",
            dtype=torch.bfloat16,
            quantization_config=transformers.BitsAndBytesConfig(**options),
            device_map="cpu",
        ).save_pretrained(tmp_path / form)
        save_tokenizer(tmp_path / form)
    save_tokenizer(tmp_path / "float")
    file = tmp_path / "text"
    file.write_text(" ".join(WORDS))
    models = [tmp_path / form for form in ("float", "4", "8")]
    rest = ("--text", file, "--window", 16, "--json")
    result = invoke("eval", *models, *rest)
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["models"]
    plain, four, eight = rows
    assert plain["weights"] == four["weights"] == eight["weights"]
    assert plain["bytes_per_weight"] == 2.0
    assert four["bytes_per_weight"] < eight["bytes_per_weight"] < 2.0
    assert eight["windows_per_pass"] == 1
    ids = torch.tensor([int(word[1:]) for word in WORDS])
    for row, folder in zip(rows, models, strict=True):
        nats, count = plain_nats(
            transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto"), ids, 16, 8
        )
        assert row["perplexity"] == pytest.approx(math.exp(nats / count), rel=1e-3), folder


# -- what is shown -------------------------------------------------------------------------------


def table_of(output: str) -> list[dict[str, str]]:
    """Rows by column."""
    head, *lines = output.replace(" MB", "MB").splitlines()
    rows = itertools.takewhile(lambda line: not line.startswith("*"), lines)
    return [dict(zip(head.split(), line.split(), strict=True)) for line in rows]


def test_a_table_of_two_models(reader: Path, other: Path, text: Path) -> None:
    """Each has its own figures; the second has its ratio to the first."""
    result = invoke("eval", reader, other, "--text", text, "--window", 16)
    assert result.exit_code == 0, result.output
    first, second = table_of(result.stdout)
    one, two = (measured(model, "--text", text, "--window", 16) for model in (reader, other))
    assert (first["ratio"], first["tokens"], first["B/weight"]) == ("1.0000", "49", "4.000")
    assert second["B/weight"] == "2.000"
    for shown, figures in ((first, one), (second, two)):
        assert float(shown["perplexity"]) == pytest.approx(figures["perplexity"], abs=1e-4)
        assert float(shown["bits/byte"]) == pytest.approx(figures["bits_per_byte"], abs=1e-4)
    ratio = two["perplexity"] / one["perplexity"]
    assert float(second["ratio"]) == pytest.approx(ratio, abs=1e-4)
    assert "*" not in result.stdout


def all_logits(model: Any, ids: torch.Tensor, window: int, stride: int) -> torch.Tensor:
    """What a plain model says before each scored token, `[tokens, words]`."""
    found, seen = [], 0
    for begin in range(0, len(ids), stride):
        end = min(begin + window, len(ids))
        first = max(seen, begin + 1)
        with torch.no_grad():
            logits = model(ids[None, begin:end], use_cache=False).logits[0]
        found.append(logits[first - begin - 1 : end - begin - 1])
        seen = end
        if end == len(ids):
            break
    return torch.cat(found)


def test_predictions_are_compared(
    reader: Path, other: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--compare`: as computed from both models' logits at once, also in small steps."""
    monkeypatch.setattr("pipeload.evaluate.compare._ITEMS", 3 * 512)
    arguments = (reader, other, "--text", text, "--window", 16, "--stride", 5, "--compare")
    result = invoke("eval", *arguments, "--json")
    assert result.exit_code == 0, result.output
    first, second = json.loads(result.stdout)["models"]
    assert (first["divergence"], first["same_top"]) == (None, None)
    ids = torch.tensor(
        transformers.AutoTokenizer.from_pretrained(reader)(text.read_text().strip())["input_ids"]
    )
    one, two = (
        all_logits(load_plain(model), ids, 16, 5).float().log_softmax(-1)
        for model in (reader, other)
    )
    apart = (one.exp() * (one - two)).sum(-1).mean()
    assert second["divergence"] == pytest.approx(float(apart), rel=1e-4)
    same = (one.argmax(-1) == two.argmax(-1)).float().mean()
    assert second["same_top"] == pytest.approx(float(same))
    shown = table_of(invoke("eval", *arguments).stdout)
    assert shown[0]["KL"] == "-"
    assert float(shown[1]["KL"]) == pytest.approx(second["divergence"], abs=1e-5)
    itself = json.loads(invoke("eval", reader, *arguments[:1], *arguments[2:], "--json").stdout)
    assert (itself["models"][1]["divergence"], itself["models"][1]["same_top"]) == (0.0, 1.0)


def test_predictions_that_cannot_be_compared(
    reader: Path, foreign: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With nobody, with other tokens, and without room for the first one's."""
    alone = invoke("eval", reader, "--text", text, "--compare")
    assert "Name another one" in alone.stderr
    result = invoke("eval", reader, foreign, "--text", text, "--compare", "--json")
    assert json.loads(result.stdout)["models"][1]["divergence"] is None
    monkeypatch.setenv("TMPDIR", str(tmp_path / "nowhere"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    refused = invoke("eval", reader, reader, "--text", text, "--compare")
    assert "Set TMPDIR" in refused.stderr


def test_different_tokenizers(reader: Path, foreign: Path, text: Path) -> None:
    """No ratio, and a line that says what can be compared."""
    result = invoke("eval", reader, foreign, "--text", text, "--window", 16)
    _, second = table_of(result.stdout)
    assert (second["ratio"], second["perplexity"][-1]) == ("-", "*")
    assert "perplexities of different tokenizers do not compare" in result.stdout
    rows = json.loads(invoke("eval", reader, foreign, "--text", text, "--json").stdout)["models"]
    assert [row["same_tokens"] for row in rows] == [True, False]
    assert (rows[0]["ratio"], rows[1]["ratio"]) == (1.0, None)


def test_json(reader: Path, text: Path) -> None:
    """One object with what was asked for, raw numbers, and a list of models, also for one."""
    result = json.loads(invoke("eval", reader, "--text", text, "--stride", 4, "--json").stdout)
    assert (result["text"], result["stride"]) == (str(text), 4)
    assert result["window"] == 256  # the model knows no more positions
    (row,) = result["models"]
    assert row["model"] == str(reader)
    assert row["text_bytes_scored"] == len(" ".join(WORDS)) - len(WORDS[0])
    assert row["tokens_per_second"] == pytest.approx(49 / row["seconds"])
    assert row["bytes_per_weight"] == row["weight_bytes"] / row["weights"] == 4.0


def test_a_short_text_is_one_window(reader: Path, text: Path) -> None:
    """It is said, and scored."""
    result = invoke("eval", reader, "--text", text, "--window", 60)
    assert "50 tokens, less than a window of 60" in result.stderr
    assert table_of(result.stdout)[0]["tokens"] == "49"
    assert invoke("eval", reader, "--text", text, "--window", 60, "--quiet").stderr == ""


def test_progress(reader: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines where there is no terminal: what is done, and how long the rest takes."""
    monkeypatch.setattr(progress_bar, "_SECONDS_BETWEEN_LINES", 0.0)
    result = invoke("eval", reader, "--text", text, "--window", 16, "--batch", 1)
    lines = [line for line in result.stderr.splitlines() if " of 49 tokens, about " in line]
    done = [int(line.split(": ")[1].split()[0]) for line in lines]
    assert done == sorted(done)
    assert (done[0], done[-1]) == (15 // 6, 49)
    assert len(done) > 6


# -- errors --------------------------------------------------------------------------------------


def refused(message: str, *arguments: object) -> None:
    """One line on stderr, nothing on stdout, exit status 1."""
    result = invoke("eval", *arguments, "--quiet")
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert message in result.stderr


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read the text"),
        (b"", "is empty"),
        (b" \n\n", "is empty"),
        (b"MZ\x90\0\x03", "zero byte at 3"),
        ("Grüße".encode("latin-1"), "byte 2 is 0xfc"),
        (b"w17", "makes fewer than 2 tokens"),
    ],
)
def test_texts_that_are_none(
    reader: Path, tmp_path: Path, content: bytes | None, message: str
) -> None:
    """Missing, empty, binary, of another encoding, too short."""
    file = tmp_path / "text"
    if content is not None:
        file.write_bytes(content)
    refused(message, reader, "--text", file)


def test_options_that_do_not_go_together(reader: Path, text: Path) -> None:
    """A stride that leaves gaps, a window beyond what the model knows."""
    refused("--stride 9", reader, "--text", text, "--window", 8, "--stride", 9)
    refused("longer than the 256 positions", reader, "--text", text, "--window", 257)
    refused("no folder './missing'", reader, "./missing", "--text", text)


def test_models_without_their_tokenizer(tiny: TinyCheckpoint, tmp_path: Path, text: Path) -> None:
    """None at all, or one with more tokens than the model knows."""
    refused("has no tokenizer", tiny("llama"), "--text", text)
    shutil.copytree(tiny("llama"), tmp_path / "model")
    save_tokenizer(tmp_path / "model", words=600)
    text.write_text("w5 w599")
    refused("another model's: it makes token 599", tmp_path / "model", "--text", text)


@pytest.mark.slow
def test_limits_that_are_too_small(smollm2_bf16: Path, tmp_path: Path) -> None:
    """Refused before anything is read, with one that is enough for the logits of a window, too."""
    file = tmp_path / "text"
    file.write_text(LICENSE.read_text()[:700])
    rest = ("--text", file, "--window", 128)
    with steady_floor(modules=True):
        result = invoke("eval", smollm2_bf16, *rest, "--memory-limit", "1MB", "--quiet")
        assert (result.exit_code, result.stdout) == (1, "")
        enough = int(result.stderr.split("works here is ")[1].split()[0])
        assert enough > smallest_limit(smollm2_bf16, dtype="auto", tokens=128)
        assert measured(smollm2_bf16, *rest, "--memory-limit", enough)["windows_per_pass"] == 1
        refused("is too small", smollm2_bf16, *rest, "--memory-limit", enough - 4_000_000)


def test_a_pass_that_does_not_fit_any_more(
    reader: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Should memory be gone when it comes to it, the line names what may be made smaller."""

    def gone(*_args: object, **_options: object) -> None:
        raise pipeload.MemoryLimitError("this pass", limit=10**9, smallest_limit=2 * 10**9)

    monkeypatch.setattr("pipeload.cli.evaluate.measure", gone)
    rest = (reader, "--text", text, "--window", 16)
    refused("1 x 16 tokens do not fit beside the weights", *rest)
    refused("--memory-limit 2000000000 is enough", *rest)


class Predictor(torch.nn.Module):
    """Gives every token the same logits, for all positions, as older models do."""

    def __init__(self, logits: list[float], device: str = "cpu") -> None:
        super().__init__()
        self.device = torch.device(device)
        self.logits = torch.tensor(logits, device=device)

    def forward(self, input_ids: torch.Tensor) -> Any:
        assert input_ids.device == self.device
        return SimpleNamespace(logits=self.logits.expand(*input_ids.shape, -1))


def losses_of(
    logits: list[float], windows: Sequence[Window], ids: torch.Tensor, *, device: str = "cpu"
) -> Any:
    handle: Any = SimpleNamespace(pass_bytes=lambda **_: 0)
    return perplexity.measure(
        Predictor(logits, device), handle, ids, windows, batch=2, pass_begins=lambda *_: None
    )


def test_a_model_without_logits_to_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    """All its logits are taken, in pieces as small as one row; fair dice have six eyes."""
    monkeypatch.setattr(perplexity, "_MOST_LOGITS", 1)
    ids = torch.arange(40) % 6
    windows = slide(40, window=8, stride=4)
    assert losses_of([2.0] * 6, windows, ids).perplexity == pytest.approx(6, rel=1e-6)
    unfair = losses_of([math.log(4), 0.0, 0.0, 0.0, 0.0, 0.0], windows, ids)
    assert unfair.nats[6] == pytest.approx(math.log(9 / 4), rel=1e-6)
    assert unfair.nats[7] == pytest.approx(math.log(9), rel=1e-6)
    assert unfair.nats[0].isnan()


def test_losses_are_computed_on_the_models_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs, logits and what they should have been are there, on one that has shapes alone."""
    asked = []

    def count(before: torch.Tensor, wanted: torch.Tensor, *, reduction: str) -> torch.Tensor:
        assert reduction == "none"
        asked.append((before.device.type, wanted.device.type))
        return torch.ones(len(wanted))

    monkeypatch.setattr(perplexity, "cross_entropy", count)
    ids, windows = torch.zeros(40, dtype=torch.int64), slide(40, window=8, stride=4)
    losses = losses_of([0.0] * 6, windows, ids, device="meta")
    assert set(asked) == {("meta", "meta")}
    assert losses.total_nats == 39
    assert losses.nats.device == torch.device("cpu")


@pytest.mark.parametrize("broken", [math.nan, -math.inf])
def test_losses_that_are_no_numbers(broken: float) -> None:
    """It names the token, rather than print a perplexity of NaN."""
    ids = torch.tensor([0, 0, 0, 1, 0])
    with pytest.raises(pipeload.PipeloadError, match=r"loss of token (1|3) is (nan|inf)"):
        losses_of([0.0, broken], slide(5, window=4, stride=2), ids)


@pytest.mark.slow
def test_control_c(reader: Path, tmp_path: Path) -> None:
    """In the middle: exit status 130, no traceback."""
    file = tmp_path / "text"
    file.write_text(" ".join(WORDS * 400))
    process = start("eval", reader, "--text", file, "--window", 200, "--stride", 1)
    assert process.stdout is not None
    assert process.stderr is not None
    assert "20000 tokens in 19801 windows" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert "Traceback" not in process.stderr.read()
    process.stdout.close()
    process.stderr.close()
