"""What the tool that runs others' programs holds against the limit."""

from __future__ import annotations

from tests.tools.clients import peak_since_load

TOLD = """\
BertModel
memory limit    552 MB
peak memory     611 MB
peak since load 527 MB
BertForSequenceClassification
peak since load 1.09 GB
"""


def test_the_most_of_all_models_without_what_imports_held() -> None:
    assert peak_since_load(TOLD) == 1_090_000_000
    assert peak_since_load(TOLD.replace("1.09 GB", "509 MB")) == 527_000_000
    assert peak_since_load("peak memory 1 MB") == 0
