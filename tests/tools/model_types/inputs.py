"""Inputs for a model of any kind, made from the names in its forward's signature and its sizes."""

from __future__ import annotations

import inspect
import itertools
from typing import TYPE_CHECKING, Any

import torch

from tests.tools.model_types.special_inputs import special_inputs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TOKENS = 11
_MOST_TRIES = 24
_MOST_FEATURES = 300
_Inputs = dict[str, Any]
_MAINS = ("input_ids", "pixel_values", "input_features", "input_values", "flattened_patches",
          "decoder_input_ids", "bbox")  # fmt: skip


def candidates(model: Any) -> Iterator[_Inputs]:
    """Inputs worth trying, richest first: those with pictures or sounds, then text alone."""
    parameters = inspect.signature(model.forward).parameters
    yield from special_inputs(model)
    if type(model).forward is torch.nn.Module.forward:
        return  # it generates alone, and without being told for how long it does so long
    richest = _with_features(model, parameters)
    if richest:
        yield from richest
    names = _wanted(model, parameters)
    choices = [[(name, value) for value in _values(model, name, names)] for name in names]
    found = [dict(pairs) for pairs in itertools.islice(itertools.product(*choices), _MOST_TRIES)]
    yield from found
    several = [name for name in _MAINS if name in parameters]
    if len(several) > 1:
        choices = [[(name, value) for value in _values(model, name, names)] for name in several]
        yield from (dict(p) for p in itertools.islice(itertools.product(*choices), _MOST_TRIES))
    if "input_ids" in parameters and names != ["input_ids"]:
        text = {"input_ids": _ids(model)}
        if "decoder_input_ids" in parameters:
            text["decoder_input_ids"] = _ids(model, 5)
        yield text
        yield {"input_ids": _ids(model)}
    dummy = getattr(model, "dummy_inputs", None)
    if isinstance(dummy, dict):
        yield dict(dummy)


def _wanted(model: Any, parameters: Any) -> list[str]:
    """Parameters without a default, the main input, and what goes with it."""
    skipped = {"self", "args", "kwargs"}
    names = [
        name
        for name, parameter in parameters.items()
        if parameter.default is inspect.Parameter.empty
        and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        and name not in skipped
    ]
    main = getattr(model, "main_input_name", "input_ids")
    main = main if isinstance(main, str) else main[0]
    if main in parameters and main not in names:
        names.insert(0, main)
    if not names:
        names = [name for name in (*_MAINS, "hidden_states") if name in parameters][:1]
    encoding = getattr(model.config, "is_encoder_decoder", False)
    if "decoder_input_ids" in parameters and encoding and "decoder_input_ids" not in names:
        names.append("decoder_input_ids")
    # What a picture comes with: its grid, for those that take patches.
    if "pixel_values" in names or "hidden_states" in names:
        names += [n for n in ("image_grid_thw", "grid_thw", "grid_hw", "spatial_shapes")
                  if n in parameters and n not in names]  # fmt: skip
    if "pixel_values" in names and "input_ids" in parameters and "input_ids" not in names:
        names.append("input_ids")
    return names


def _values(model: Any, name: str, names: list[str]) -> list[Any]:
    makers: dict[str, Callable[[], list[Any]]] = {
        "input_ids": lambda: [_ids(model)],
        "decoder_input_ids": lambda: [_ids(model, 5)],
        "pixel_values": lambda: _pictures(model, names),
        "pixel_values_videos": lambda: _videos(model),
        "input_features": lambda: _features(model),
        "input_values": lambda: _sounds(model),
        "audio_values": lambda: _sounds(model),
        "attention_mask": lambda: [torch.ones(1, TOKENS, dtype=torch.long)],
        "inputs_embeds": lambda: [_noise(1, TOKENS, width) for width in _widths(model)],
        "hidden_states": lambda: _hidden(model, names),
        "flattened_patches": lambda: [_flat_patches(model)],
        "past_values": lambda: [_noise(1, _number(model, 32, "context_length"))],
        "bbox": lambda: [torch.zeros(1, TOKENS, 4, dtype=torch.long)],
        "image_grid_thw": lambda: [torch.tensor([[1, 4, 4]])],
        "grid_thw": lambda: [torch.tensor([[1, 4, 4]])],
        "grid_hw": lambda: [torch.tensor([[4, 4]])],
        "spatial_shapes": lambda: [torch.tensor([[4, 4]])],
        "position_ids": lambda: [torch.arange(TOKENS)[None]],
        "feature_lens": lambda: [torch.tensor([64])],
        "audio_codes": lambda: [torch.randint(0, 32, (1, _number(model, 8, "num_quantizers"), 8))],
        "codec_ids": lambda: [torch.randint(0, 32, (1, 8, _number(model, 8, "num_codebooks")))],
    }
    maker = makers.get(name)
    if maker is not None:
        return maker()
    if name.endswith(("_ids", "_tokens", "labels", "codes", "indices")):
        return [_ids(model)]
    if name.endswith("mask"):
        return [torch.ones(1, TOKENS, dtype=torch.long)]
    if "pixel" in name or "image" in name:
        return _pictures(model, names)
    if "feature" in name or "mel" in name or "spectrogram" in name:
        return _features(model)
    return [_noise(1, TOKENS, width) for width in _widths(model)]


def _with_features(model: Any, parameters: Any) -> list[_Inputs]:
    """Text with a picture or a sound in it, where the model says how many tokens that takes."""
    if "input_ids" not in parameters:
        return []
    kinds: tuple[tuple[str, str, Callable[[list[str]], list[Any]]], ...] = (
        ("image", "pixel_values", lambda names: _pictures(model, names)),
        ("audio", "input_features", lambda _: _features(model)),
        ("audio", "input_values", lambda _: _sounds(model)),
    )
    found = (
        _with(model, parameters, kind, main, values)
        for kind, main, values in kinds
        if main in parameters and hasattr(model, f"get_{kind}_features")
    )
    return [given for given in found if given is not None]


def _with(
    model: Any,
    parameters: Any,
    kind: str,
    main: str,
    values: Callable[[list[str]], list[Any]],
) -> _Inputs | None:
    """The first of `values` that the model makes features of, and a token for each of them."""
    get = getattr(model, f"get_{kind}_features")
    token = _attribute(model, f"{kind}_token_id", f"{kind}_token_index")
    if not isinstance(token, int):
        return None
    own = [name for name in inspect.signature(get).parameters if name in parameters]
    grids = [n for n in own if n.endswith(("grid_thw", "grid_hw", "spatial_shapes"))]
    for value in values([main, *grids]):
        given: _Inputs = {main: value}
        given |= {name: _values(model, name, [main])[0] for name in grids}
        if "image_sizes" in own:
            given["image_sizes"] = torch.tensor([list(value.shape[-2:])])
        for mask in ("input_features_mask", "feature_attention_mask"):
            if mask in own:
                given[mask] = torch.ones(value.shape[0], value.shape[-1], dtype=torch.long)
        try:
            with torch.no_grad():
                count = _rows(get(**given))
        except Exception:
            continue
        if 0 < count <= _MOST_FEATURES:
            ids = _ids(model)
            ids = torch.cat([ids[:, :3], torch.full((1, count), token), ids[:, 3:]], 1)
            for types in ("mm_token_type_ids", "token_type_ids"):
                if types in parameters:
                    given[types] = (ids == token).long()
            return {"input_ids": ids, **given}
    return None


def _rows(features: Any) -> int:
    features = getattr(features, "pooler_output", features)
    if isinstance(features, (tuple, list)):
        return sum(_rows(item) for item in features)
    return int(features.shape[:-1].numel()) if isinstance(features, torch.Tensor) else 0


def _attribute(model: Any, *names: str) -> Any:
    """Of the configuration or, where that has none, of one inside it."""
    configs = [model.config]
    while configs:
        config = configs.pop(0)
        for name in names:
            value = getattr(config, name, None)
            if value is not None:
                return value
        configs += [v for v in vars(config).values() if hasattr(v, "to_diff_dict")]
    return None


def _number(model: Any, default: int, *names: str) -> int:
    value = _attribute(model, *names)
    if isinstance(value, (list, tuple)) and value:
        value = value[0]
    return value if isinstance(value, int) and value > 0 else default


def _noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


def _ids(model: Any, tokens: int = TOKENS) -> torch.Tensor:
    vocabulary = _number(model, 64, "vocab_size")
    return torch.randint(3, max(4, min(vocabulary, 256)), (1, tokens))


def _hidden(model: Any, names: list[str]) -> list[Any]:
    if any("grid" in name for name in names):
        return _pictures(model, names)
    return [_noise(1, TOKENS, width) for width in _widths(model)]


def _widths(model: Any) -> list[int]:
    names = ("hidden_size", "d_model", "embed_dim", "input_size", "input_dim")
    widths = [_number(model, 0, name) for name in names]
    return list(dict.fromkeys(width for width in widths if width)) or [64]


def _pictures(model: Any, names: list[str]) -> list[Any]:
    channels = _number(model, 3, "num_channels", "in_channels", "in_chans")
    size = _number(model, 64, "image_size", "img_size")
    patch = _number(model, 16, "patch_size")
    time = _number(model, 1, "temporal_patch_size")
    square = _noise(1, channels, size, size)
    if any("grid" in name or name == "spatial_shapes" for name in names):
        flat = channels * patch * patch
        return [
            _noise(16, flat * time),
            _noise(16, channels, patch, patch),
            _noise(1, 16, flat),
            square,
        ]
    frames = _attribute(model, "num_frames")
    found = [square]
    if isinstance(frames, int):
        found.insert(0, _noise(1, frames, channels, size, size))
    found += [
        _noise(1, 2, channels, size, size),
        _noise(1, channels, 64, 64),
        _noise(1, channels, 224, 224),
        _noise(2, channels, size, size),
        _noise(1, 1, 2, channels, size, size),
    ]
    return found


def _flat_patches(model: Any) -> torch.Tensor:
    """Patches with their row and column in front."""
    channels, side = _number(model, 3, "num_channels"), _number(model, 16, "patch_size")
    places = torch.arange(1, 17).remainder(4).add(1)[None, :, None].expand(1, 16, 2)
    return torch.cat([places, _noise(1, 16, channels * side**2)], -1)


def _videos(model: Any) -> list[Any]:
    channels = _number(model, 3, "num_channels", "in_channels")
    size = _number(model, 64, "image_size")
    frames = _number(model, 4, "num_frames", "frames_per_clip")
    return [_noise(1, frames, channels, size, size), _noise(1, frames, channels, 256, 256)]


def _features(model: Any) -> list[Any]:
    names = (
        "num_mel_bins", "feature_projection_input_dim", "input_feat_per_channel", "n_mels",
        "input_feat_size", "mel_dim", "num_mel_channels", "input_dim", "n_mel_channels",
    )  # fmt: skip
    sizes = [_number(model, 0, name) for name in names]
    found: list[Any] = []
    length = 2 * _number(model, 50, "max_source_positions")
    for bins in list(dict.fromkeys(size for size in sizes if size))[:3] or [80]:
        # Windows of audio encoders are some hundred frames long.
        found += [
            _noise(1, bins, length),
            _noise(1, length, bins),
            _noise(1, bins, 200),
            _noise(1, 200, bins),
            _noise(1, 1, bins, 200),
            _noise(1, 1, 1024, bins),
            _noise(bins, 200),
        ]
    return [*found, _noise(1, 1, 1001, 64)]


def _sounds(model: Any) -> list[Any]:
    bins = _number(model, 128, "num_mel_bins")
    length = _number(model, 1024, "max_length")
    return [_noise(1, 4000), _noise(1, 1, 4000), _noise(1, length, bins), _noise(1, 1, 24000)]
