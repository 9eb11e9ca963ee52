"""Turns the tokenizer inside a GGUF file into the files that transformers reads.

transformers can do this itself, but gives SmolLM2 a wrong end token and does
not split digits, as the metadata asks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["tokenizer_files"]

VERBATIM = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
DIGITS = {"type": "Digits", "individual_digits": True}
BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": True,
}


def tokenizer_files(metadata: Mapping[str, Any]) -> dict[str, object]:
    """The JSON files of a tokenizer, by name, from the metadata of a GGUF file.

    Args:
        metadata: Every field of the GGUF file, by name.
    """
    tokens = metadata["tokenizer.ggml.tokens"]
    kinds = metadata["tokenizer.ggml.token_type"]
    tokenizer = {
        "version": "1.0",
        **dict.fromkeys(("truncation", "padding", "normalizer", "post_processor")),
        "added_tokens": [
            {"id": number, "content": tokens[number], "special": kind == 3, **VERBATIM}
            for number, kind in enumerate(kinds)
            if kind in (3, 4)  # 3 is a control token, 4 one that the user defined
        ],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [DIGITS, BYTE_LEVEL]},
        "decoder": BYTE_LEVEL,
        "model": {
            "type": "BPE",
            **dict.fromkeys(("dropout", "unk_token")),
            **dict.fromkeys(("continuing_subword_prefix", "end_of_word_suffix")),
            **dict.fromkeys(("fuse_unk", "byte_fallback", "ignore_merges"), False),
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": metadata["tokenizer.ggml.merges"],
        },
    }
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {name: metadata[f"tokenizer.ggml.{theirs}_token_id"] for name, theirs in names.items()}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
        "chat_template": metadata["tokenizer.chat_template"],
        **{f"{name}_token": tokens[number] for name, number in ids.items()},
    }
    generation = {f"{name}_token_id": ids[name] for name in ("bos", "eos", "pad")}
    return {
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": settings,
        "generation_config.json": generation,
    }
