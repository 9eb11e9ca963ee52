#!/usr/bin/env python3
"""A mixture of experts under kernel memory caps: pipeload beside llama.cpp, which maps its file.

    python tests/tools/make_moe.py --preset qwen3-30b --layers 6 --vocab 32000 FOLDER
    python tests/tools/moe_against_llama_cpp.py FOLDER --python PYTHON --caps 0.15,0.3,0.6

FOLDER is a model of the kind that `make_moe.py --preset qwen3-30b` makes, in bf16, or a copy of it
that `pipeload quantize --method int4` has made: llama.cpp gets the same weights in BF16, or a file
of that shape in Q4_0 whose head and embedding are BF16, too, which is made beside the folder at the
first run. `--python` is an interpreter that has the package xllamacpp. Caps are shares of what the
model takes on disk. Contenders run in turn (A B A B ...), each in a process of its own in a control
group of that size, with its files' pages dropped before. Experts are chosen by each model's own
router; tokens after the prompt are drawn at random, since what a random model chooses by itself
soon repeats. `rate` is tokens/s after the prompt, `work` the processor's seconds for each of them.
Times do not count loading. Needs root.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter

from tests.support.cgroups import drop_caches, memory_cgroup
from tests.tools.make_gguf import add_words, random_blocks

if TYPE_CHECKING:
    from numpy.typing import NDArray

_OURS = r"""
import json, sys, time, torch, transformers, pipeload
transformers.utils.logging.disable_progress_bar()
folder, limit, prompt, tokens = sys.argv[1], *map(int, sys.argv[2:])
model = pipeload.from_pretrained(folder, memory_limit=limit, dtype="auto", tokens=prompt + tokens)
draw = torch.Generator().manual_seed(1)
words = torch.randint(5, 30000, (1, prompt + tokens), generator=draw)
times, cache = [], transformers.DynamicCache(config=model.config)
with torch.no_grad():
    for given in (words[:, :prompt], *words[:, prompt:].split(1, 1)):
        begun = time.process_time() if len(times) < 2 else begun
        started = time.perf_counter()
        model(input_ids=given, past_key_values=cache, logits_to_keep=1)
        times.append(time.perf_counter() - started)
stats = model.pipeload.stats()
work = time.process_time() - begun
print(json.dumps({"prompt": times[0], "steps": times[1:], "work": work,
    "hits": stats.expert_hit_rate}))
"""

# Parameters are handed over by value: of the model's, those that are set, and of the context's the
# first; what lies behind is left as the library gives it.
_THEIRS = r"""
import ctypes, importlib.util, json, random, sys, time
from pathlib import Path
from ctypes import c_bool, c_float, c_int, c_int32, c_uint32, c_void_p
path, prompt, tokens = sys.argv[1], int(sys.argv[3]), int(sys.argv[4])
found = importlib.util.find_spec("xllamacpp")
if found is None:
    sys.exit("There is no llama.cpp here. Install it: pip install xllamacpp")
library = ctypes.CDLL(str(next(Path(found.origin).parent.glob("xllamacpp*.so"))))
class Model(ctypes.Structure):
    _fields_ = [("devices", c_void_p), ("buffers", c_void_p), ("gpu_layers", c_int32),
        ("split", c_int), ("load", c_int), ("lazy", c_int), ("main", c_int32),
        ("shares", c_void_p), ("progress", c_void_p), ("data", c_void_p), ("settings", c_void_p),
        *((name, c_bool) for name in ("vocab", "check", "repack", "no_host", "no_alloc")),
        ("rest", ctypes.c_ubyte * 256)]
class Context(ctypes.Structure):
    _fields_ = [("n_ctx", c_uint32), ("rest", ctypes.c_ubyte * 508)]
class Batch(ctypes.Structure):
    _fields_ = [("n_tokens", c_int32), *((name, c_void_p) for name in "abcdef")]
for name, kind in (("llama_model_default_params", Model), ("llama_batch_get_one", Batch),
        ("llama_context_default_params", Context), ("llama_model_load_from_file", c_void_p),
        ("llama_init_from_model", c_void_p), ("llama_get_logits", ctypes.POINTER(c_float))):
    getattr(library, name).restype = kind
settings, shape = library.llama_model_default_params(), library.llama_context_default_params()
assert (settings.split, settings.repack, settings.vocab) == (1, True, False), "another version"
settings.load, settings.repack, shape.n_ctx = 1, False, prompt + tokens + 64
quiet = ctypes.CFUNCTYPE(None, c_int, ctypes.c_char_p, c_void_p)(lambda *_: None)
library.llama_log_set(quiet, None)
library.llama_backend_init()
model = library.llama_model_load_from_file(path.encode(), settings)
context = c_void_p(library.llama_init_from_model(c_void_p(model), shape))
library.llama_set_n_threads(context, 2, 2)
draw = random.Random(1)
words = [draw.randrange(5, 30000) for _ in range(prompt + tokens)]
times = []
for given in (words[:prompt], *([word] for word in words[prompt:])):
    begun = time.process_time() if len(times) < 2 else begun
    started = time.perf_counter()
    array = (c_int32 * len(given))(*given)
    assert library.llama_decode(context, library.llama_batch_get_one(array, len(given))) == 0
    library.llama_get_logits(context)[0]
    times.append(time.perf_counter() - started)
work = time.process_time() - begun
print(json.dumps({"prompt": times[0], "steps": times[1:], "work": work}))
"""


def make_moe_gguf(folder: Path, target: Path, kind: Kind) -> None:
    """Write a file for llama.cpp of the shape of a Qwen3 mixture of experts.

    With `Kind.BF16` its weights are those of `folder`; else they are random, which makes no
    difference to its speed, and embedding and head are zeros and ones in BF16.
    """
    config = json.loads((folder / "config.json").read_text())
    hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
    experts, width = config["num_experts"], config["head_dim"]
    heads, keys = config["num_attention_heads"], config["num_key_value_heads"]
    writer: Any = GGUFWriter(str(target), "qwen3moe", use_temp_file=True)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_expert_feed_forward_length(inner)
    writer.add_expert_count(experts)
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(keys)
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(config.get("rope_theta", 10000.0))
    add_words(writer, config["vocab_size"])
    matrices = _Matrices(folder, kind)
    for name in ("token_embd", "output"):
        writer.add_tensor(
            f"{name}.weight",
            matrices.bf16(_OUTSIDE[name], (config["vocab_size"], hidden)),
            raw_dtype=Kind.BF16,
        )
    writer.add_tensor("output_norm.weight", np.ones(hidden, np.float32))
    for layer in range(config["num_hidden_layers"]):
        start, path = f"blk.{layer}", f"model.layers.{layer}"
        for name, size in (("attn", hidden), ("ffn", hidden), ("attn_q", width), ("attn_k", width)):
            writer.add_tensor(f"{start}.{name}_norm.weight", np.ones(size, np.float32))
        shapes = {
            "q": (heads * width, hidden),
            "k": (keys * width, hidden),
            "v": (keys * width, hidden),
            "o": (hidden, heads * width),
        }
        for letter, shape in shapes.items():
            name = "attn_output" if letter == "o" else f"attn_{letter}"
            values = matrices.stacked([f"{path}.self_attn.{letter}_proj.weight"], shape)
            writer.add_tensor(f"{start}.{name}.weight", values[0], raw_dtype=kind)
        router = np.random.default_rng(layer).normal(0, 0.02, (experts, hidden))
        writer.add_tensor(f"{start}.ffn_gate_inp.weight", router.astype(np.float32))
        for part in ("gate", "up", "down"):
            shape = (hidden, inner) if part == "down" else (inner, hidden)
            names = [f"{path}.mlp.experts.{e}.{part}_proj.weight" for e in range(experts)]
            values = matrices.stacked(names, shape)
            writer.add_tensor(f"{start}.ffn_{part}_exps.weight", values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


_OUTSIDE = {"token_embd": "model.embed_tokens.weight", "output": "lm_head.weight"}


class _Matrices:
    """Values of matrices: of the checkpoint in BF16, random blocks of another kind."""

    def __init__(self, folder: Path, kind: Kind) -> None:
        from safetensors import safe_open

        self._kind, self._random = kind, np.random.default_rng(0)
        files: list[Any] = [safe_open(file, "pt") for file in folder.glob("*.safetensors")]
        self._files = {name: file for file in files for name in file.keys()}  # noqa: SIM118

    def bf16(self, name: str, shape: tuple[int, int]) -> NDArray[np.uint8]:
        """Of one matrix, as bytes: [rows, 2 x columns]."""
        import torch

        values: NDArray[np.uint8] = self._files[name].get_tensor(name).view(torch.uint8).numpy()
        return values.reshape(shape[0], -1)

    def stacked(self, names: list[str], shape: tuple[int, int]) -> NDArray[np.uint8]:
        """Of several of one shape, as bytes: [matrices, rows, bytes of a row]."""
        if self._kind == Kind.BF16:
            return np.stack([self.bf16(name, shape) for name in names])
        blocks = random_blocks((len(names) * shape[0], shape[1]), self._kind, self._random)
        return blocks.reshape(len(names), shape[0], -1)


def measure(command: list[str], path: Path, cap: int, *counts: int) -> dict[str, Any]:
    """One run in a group of `cap` bytes; {"failed": why} where it did not end well."""
    drop_caches(path)
    with memory_cgroup(cap) as group:
        given = [*command, str(path), str(cap), *map(str, counts)]
        try:
            done = group.run(given, timeout=900)
        except subprocess.TimeoutExpired:
            return {"failed": "took longer than 900 s"}
    if done.returncode:
        why = "killed by the kernel" if done.returncode == -9 else done.stderr.strip()[-300:]
        return {"failed": why}
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    steps = told.pop("steps")
    told |= {"rate": len(steps) / sum(steps), "work": told["work"] / len(steps)}
    return told


def main() -> None:
    """Print every run and, for each cap, medians and the ratios of the pairs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--python", default=sys.executable, help="has xllamacpp")
    parser.add_argument("--caps", default="0.15,0.3,0.6")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    quantised = "quantization_config" in json.loads((given.model / "config.json").read_text())
    kind = Kind.Q4_0 if quantised else Kind.BF16
    file = given.model.parent / f"{given.model.name}-{kind.name}.gguf"
    if not file.exists():
        partial = file.with_suffix(".partial")
        make_moe_gguf(given.model, partial, kind)
        partial.replace(file)
    nbytes = sum(part.stat().st_size for part in given.model.glob("*.safetensors"))
    print(f"pipeload {nbytes / 1e9:.2f} GB, llama.cpp {file.stat().st_size / 1e9:.2f} GB")
    for share in map(float, given.caps.split(",")):
        cap = int(share * nbytes)
        pairs = []
        for _ in range(given.rounds):
            counts = given.prompt, given.tokens
            ours = measure([sys.executable, "-c", _OURS], given.model, cap, *counts)
            theirs = measure([given.python, "-c", _THEIRS], file, cap, *counts)
            print(f"{share} of it, {cap / 1e6:.0f} MB: pipeload {ours}, llama.cpp {theirs}")
            sys.stdout.flush()
            pairs.append((ours, theirs))
        if all("rate" in ours and "rate" in theirs for ours, theirs in pairs):
            decode = statistics.median(ours["rate"] / theirs["rate"] for ours, theirs in pairs)
            prompt = statistics.median(theirs["prompt"] / ours["prompt"] for ours, theirs in pairs)
            print(f"{share}: decodes {decode:.2f} times as fast, the prompt {prompt:.2f} times")


if __name__ == "__main__":
    main()
