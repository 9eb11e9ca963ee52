"""Loops over a data set, the library's Trainer and hand-written ones: streamed as plain."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainingArguments,
)

from pipeload import UnsupportedOperationError
from tests.support.exact import prompt
from tests.support.models import load_plain, randomize
from tests.support.users import WAYS, Pair, load_by

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.conftest import TinyCheckpoint


@pytest.fixture(scope="module", params=WAYS)
def decoder(request: pytest.FixtureRequest, tiny: TinyCheckpoint) -> Pair:
    folder = tiny("llama")
    return Pair(load_plain(folder), load_by(request.param, folder))


# -- loops ----------------------------------------------------------------------------------------


class Rows(Dataset[dict[str, Any]]):
    """Seven rows with a label each; holds the model, as careless scripts do."""

    def __init__(self, labels: Callable[[torch.Tensor], Any], model: Any = None) -> None:
        self.labels, self.model = labels, model

    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = prompt(1, 10, seed=index)[0]
        return {"input_ids": ids, "labels": self.labels(ids)}


def trainer_of(model: Any, folder: Path, **options: Any) -> Any:
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_eval_batch_size=3,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **options,
    )
    return Trainer(model=model, args=arguments)


def scored(trainer: Any, rows: Rows) -> list[Any]:
    """What `predict` and `evaluate` say, but for the times."""
    output = trainer.predict(rows)
    metrics = trainer.evaluate(rows)
    return [
        torch.as_tensor(output.predictions),
        torch.as_tensor(output.label_ids),
        output.metrics["test_loss"] if output.metrics else None,
        metrics["eval_loss"],
    ]


@pytest.mark.parametrize("way", WAYS)
def test_trainer_with_a_classifier(way: str, tmp_path: Path) -> None:
    """`Trainer.predict` and `Trainer.evaluate`."""
    config = BertConfig(
        vocab_size=512,
        hidden_size=96,
        intermediate_size=176,
        num_hidden_layers=4,
        num_attention_heads=6,
    )
    config.num_labels = 3
    original = BertForSequenceClassification(config)
    randomize(original, seed=3)
    original.save_pretrained(tmp_path)
    auto_class = AutoModelForSequenceClassification
    plain = auto_class.from_pretrained(tmp_path)
    pair = Pair(plain, load_by(way, tmp_path, auto_class))
    rows = Rows(lambda ids: int(ids[0]) % 3)
    predictions, *_ = pair.check(lambda model: scored(trainer_of(model, tmp_path), rows))
    assert predictions.shape == (7, 3)


@pytest.mark.parametrize("workers", [0, 2])
def test_trainer_with_a_decoder(decoder: Pair, tmp_path: Path, workers: int) -> None:
    """Also with rows that are made in processes beside the model."""
    rows = Rows(lambda ids: ids)
    predictions, *_ = decoder.check(
        lambda model: scored(trainer_of(model, tmp_path, dataloader_num_workers=workers), rows)
    )
    assert predictions.shape == (7, 10, 512)


def test_trainer_that_casts(tiny: TinyCheckpoint, decoder: Pair, tmp_path: Path) -> None:
    """Full evaluation in bf16 casts the model: refused, and no matter for one that is bf16."""
    rows = Rows(lambda ids: ids)
    with pytest.raises(UnsupportedOperationError, match="dtype="):
        trainer_of(decoder.model, tmp_path, bf16_full_eval=True).predict(rows)
    decoder.check(lambda model: scored(trainer_of(model, tmp_path), rows))
    folder = tiny("llama", "bf16")
    pair = Pair(load_plain(folder), load_by("streaming", folder))
    pair.check(lambda model: scored(trainer_of(model, tmp_path, bf16_full_eval=True), rows))


def test_trainer_that_trains(decoder: Pair, tmp_path: Path) -> None:
    """Training is refused in words, and evaluation goes on."""
    rows = Rows(lambda ids: ids)
    trainer = trainer_of(decoder.model, tmp_path, max_steps=1, save_strategy="no")
    trainer.train_dataset = rows
    with pytest.raises(UnsupportedOperationError, match="no_grad"):
        trainer.train()
    decoder.model.eval()
    decoder.check(lambda model: scored(trainer_of(model, tmp_path), rows))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("workers", [0, 2])
def test_data_loaders(decoder: Pair, mode: Any, workers: int) -> None:
    """Processes that are forked beside a streamed model, and hold it, end as they should."""

    def loop(model: Any) -> list[torch.Tensor]:
        rows = Rows(lambda ids: ids, model)
        found = []
        loader = DataLoader(
            rows,
            batch_size=2,
            num_workers=workers,
            multiprocessing_context="fork" if workers else None,
        )
        with mode():
            for batch in loader:
                output = model(**batch)
                found += [output.loss.clone(), output.logits.argmax(-1)]
        return found

    assert len(decoder.check(loop)) == 8
