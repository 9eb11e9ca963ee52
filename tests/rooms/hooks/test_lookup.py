"""Which modules read exactly the rows they are given, by the code of their forward."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pipeload_hooks import takes_ids
from pipeload_hooks._lookup import attributes_used

ROWS, COLUMNS = 7, 4

# Every class of transformers 5.24 that derives from nn.Embedding and looks up its argument.
TAKE_IDS = {
    "BartScaledWordEmbedding",
    "BigBirdPegasusScaledWordEmbedding",
    "BioGptScaledWordEmbedding",
    "BlenderbotScaledWordEmbedding",
    "DiffusionGemmaTextScaledWordEmbedding",
    "EmbeddingGemma2TextScaledWordEmbedding",
    "FP8Embedding",
    "Gemma2TextScaledWordEmbedding",
    "Gemma3TextScaledWordEmbedding",
    "Gemma3nTextScaledWordEmbedding",
    "Gemma4TextScaledWordEmbedding",
    "Gemma4UnifiedTextScaledWordEmbedding",
    "GemmaTextScaledWordEmbedding",
    "Inkling2LoopNormedEmbedding",
    "Inkling2NormedEmbedding",
    "InklingNormedEmbedding",
    "M2M100ScaledWordEmbedding",
    "MBartScaledWordEmbedding",
    "MiniCPM3ScaledWordEmbedding",
    "MuseGlimmerTextNormedEmbedding",
    "MuseSparkTextNormedEmbedding",
    "NllbMoeScaledWordEmbedding",
    "PLBartScaledWordEmbedding",
    "PPFormulaNetScaledWordEmbedding",
    "PegasusXScaledWordEmbedding",
    "SeamlessM4TScaledWordEmbedding",
    "SeamlessM4Tv2ScaledWordEmbedding",
    "T5Gemma2TextScaledWordEmbedding",
    "TrOCRScaledWordEmbedding",
    "VaultGemmaTextScaledWordEmbedding",
    "XGLMScaledWordEmbedding",
}
# And all others: they compute ids, or read the weight in another way.
DO_NOT = {
    "AutoformerSinusoidalPositionalEmbedding",
    "BartLearnedPositionalEmbedding",
    "BigBirdPegasusLearnedPositionalEmbedding",
    "BioGptLearnedPositionalEmbedding",
    "BlenderbotLearnedPositionalEmbedding",
    "BlenderbotSmallLearnedPositionalEmbedding",
    "IdeficsDecoupledEmbedding",
    "InformerSinusoidalPositionalEmbedding",
    "LEDLearnedPositionalEmbedding",
    "MBartLearnedPositionalEmbedding",
    "MarianSinusoidalPositionalEmbedding",
    "MvpLearnedPositionalEmbedding",
    "OPTLearnedPositionalEmbedding",
    "Ovis2VisualEmbeddingTable",
    "PLBartLearnedPositionalEmbedding",
    "PPFormulaNetLearnedPositionalEmbedding",
    "PegasusSinusoidalPositionalEmbedding",
    "ProphetNetPositionalEmbeddings",
    "RoFormerSinusoidalPositionalEmbedding",
    "SinusoidalPositionalEmbedding",
    "TimeSeriesSinusoidalPositionalEmbedding",
    "TrOCRLearnedPositionalEmbedding",
    "WhisperPositionalEmbedding",
}

EMBEDDING = re.compile(r"^ *class \w+\(.*\bnn\.Embedding\b", re.MULTILINE)


def embedding_classes() -> list[ast.ClassDef]:
    """Those of the installed transformers, from source: importing all of it takes minutes.

    Files named modular_ are what the others are generated from.
    """
    found = importlib.util.find_spec("transformers")
    assert found is not None
    assert found.origin is not None
    texts = [
        path.read_text(encoding="utf-8")
        for path in sorted(Path(found.origin).parent.rglob("*.py"))
        if not path.name.startswith("modular_")
    ]
    nodes = [n for text in texts if EMBEDDING.search(text) for n in ast.walk(ast.parse(text))]
    return [
        node
        for node in nodes
        if isinstance(node, ast.ClassDef)
        and any(ast.unparse(base).endswith("nn.Embedding") for base in node.bases)
    ]


def test_the_librarys_classes() -> None:
    """The rule tells word tables from positions. A new version's classes are to be looked at."""
    verdicts: dict[str, bool] = {}
    for node in embedding_classes():
        (forward,) = (n for n in node.body if getattr(n, "name", "") == "forward")
        assert isinstance(forward, ast.FunctionDef)
        verdicts[node.name] = attributes_used(forward) is not None
    takes = {name for name, verdict in verdicts.items() if verdict}
    known = TAKE_IDS | DO_NOT
    assert takes & known == TAKE_IDS & set(verdicts)
    # Those that this list does not know yet must be judged right by their names, at least.
    assert not any("Position" in name for name in takes)
    assert len(takes & TAKE_IDS) > 20


def test_real_modules() -> None:
    """The same by way of the module: source and bytecode are found and agree."""
    from transformers.models.bart.modeling_bart import (
        BartLearnedPositionalEmbedding,
        BartScaledWordEmbedding,
    )
    from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

    assert takes_ids(BartScaledWordEmbedding(ROWS, COLUMNS, 1))
    assert takes_ids(Gemma3TextScaledWordEmbedding(ROWS, COLUMNS, 0, 2.0))
    assert not takes_ids(BartLearnedPositionalEmbedding(ROWS, COLUMNS))


class Scaled(nn.Embedding):
    scale = 2.0  # an attribute of the class could be a property

    def __init__(self) -> None:
        super().__init__(ROWS, COLUMNS)
        self.factor = 2.0
        self.norm = nn.LayerNorm(COLUMNS)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        found = super().forward(input) * torch.tensor(self.factor).to(self.weight.dtype)
        found[input == 3] = 0.0
        normed: torch.Tensor = self.norm(found.view(*input.shape, -1))
        return normed.to(self.weight.device)


class ScaledTwice(Scaled):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Calls a forward that the rule knows."""
        return super().forward(input) * self.factor


class Inherited(ScaledTwice):
    pass


@pytest.mark.parametrize(
    "module",
    [
        nn.Embedding(ROWS, COLUMNS),
        nn.Embedding(ROWS, COLUMNS, padding_idx=0, sparse=True, scale_grad_by_freq=True),
        Scaled(),
        ScaledTwice(),
        Inherited(),
    ],
    ids=["plain", "options", "Scaled", "ScaledTwice", "Inherited"],
)
def test_takes_ids(module: nn.Module) -> None:
    """Plain tables, and those that work on what was looked up."""
    assert takes_ids(module)


class Shifted(nn.Embedding):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input + 1)


class Rebound(nn.Embedding):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        input = input.clamp(max=3)
        return super().forward(input)


class InPlace(nn.Embedding):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        input[input > 3] = 3
        return super().forward(input)


class InPlaceMethod(nn.Embedding):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        input.clamp_(max=3)
        return super().forward(input)


class Alias(nn.Embedding):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        (also,) = (input,)
        also += 1
        return super().forward(input)


class ByImport(nn.Embedding):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        import math as input  # type: ignore[assignment]

        return super().forward(input)


class WholeWeight(nn.Embedding):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) - self.weight.mean()


class ByMethod(nn.Embedding):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) + self.first()

    def first(self) -> torch.Tensor:
        return self.weight[0]


class ByProperty(nn.Embedding):
    @property
    def first(self) -> torch.Tensor:
        return self.weight[0]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) + self.first


class Escapes(nn.Embedding):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        other: torch.Tensor = vars(self)["_parameters"]["weight"][0]
        return super().forward(input) + other


class Inner(nn.Embedding):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return torch.stack([super(Inner, self).forward(input) for input in (input + 1,)])


class Positions(nn.Embedding):
    def forward(self, input: torch.Tensor, offset: int = 0) -> torch.Tensor:
        return super().forward(torch.arange(offset, offset + input.shape[-1]))


class NoLookup(nn.Embedding):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input.new_zeros(input.shape)


class Decorated(nn.Embedding):
    @torch.no_grad()
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input)


class ComputedWeight(nn.Embedding):
    def __init__(self, rows: int, columns: int) -> None:
        super().__init__(rows, columns)
        del self.weight
        self.inner = nn.Parameter(torch.ones(rows, columns))

    @property
    def weight(self) -> torch.Tensor:
        return self.inner

    @weight.setter
    def weight(self, value: Any) -> None:
        self._parameters["weight"] = value

    @weight.deleter
    def weight(self) -> None:
        del self._parameters["weight"]


class OtherCall(nn.Embedding):
    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        return self.forward(input + 1)


class ClassAttribute(Scaled):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * self.scale


class OnAnother(Shifted):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input)


class Unrelated(nn.Module):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input


@pytest.mark.parametrize(
    "cls",
    [
        Shifted,
        Rebound,
        InPlace,
        InPlaceMethod,
        Alias,
        ByImport,
        WholeWeight,
        ByMethod,
        ByProperty,
        Escapes,
        Inner,
        Positions,
        NoLookup,
        Decorated,
        ComputedWeight,
        OtherCall,
        OnAnother,
    ],
)
def test_does_not_take_ids(cls: type[nn.Embedding]) -> None:
    """Ids that are changed on the way, a weight that is read elsewhere, or code not understood."""
    assert not takes_ids(cls(ROWS, COLUMNS))


def test_other_reasons() -> None:
    """Rows that change as they are read, replaced forwards, no table at all, no source."""
    assert not takes_ids(nn.Embedding(ROWS, COLUMNS, max_norm=1.0))
    assert not takes_ids(nn.EmbeddingBag(ROWS, COLUMNS))
    assert not takes_ids(Unrelated())
    assert not takes_ids(ClassAttribute())
    replaced = nn.Embedding(ROWS, COLUMNS)
    replaced.forward = lambda input: input  # type: ignore[method-assign]
    assert not takes_ids(replaced)
    code = "class Made(nn.Embedding):\n def forward(self, x):\n  return super().forward(x)\n"
    names: dict[str, Any] = {"nn": nn}
    exec(code, names)
    assert not takes_ids(names["Made"](ROWS, COLUMNS))


def test_a_forward_lent_to_another_class() -> None:
    """There `super()` means the other class's parent."""
    lent = type("Lent", (nn.Embedding,), {"forward": Scaled.forward})
    assert not takes_ids(lent(ROWS, COLUMNS))


def test_a_source_that_changed(tmp_path: Path) -> None:
    """What stands in the file now says nothing about the code that was loaded from it."""
    path = tmp_path / "made.py"
    text = "from torch import nn\n\n\nclass Made(nn.Embedding):\n    def forward(self, x):\n"

    def load(body: str) -> type[nn.Embedding]:
        path.write_text(text + f"        return super().forward(x{body})\n", encoding="utf-8")
        names: dict[str, Any] = {"__name__": "made"}
        exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), names)
        cls: type[nn.Embedding] = names["Made"]
        return cls

    assert takes_ids(load("")(ROWS, COLUMNS))
    old = load(" + 1")
    load("")
    assert not takes_ids(old(ROWS, COLUMNS))
