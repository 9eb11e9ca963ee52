"""Each example runs as it stands: with this Python, or with the one that a variable names."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
PYTHON = os.environ.get("PIPELOAD_EXAMPLES_PYTHON", sys.executable)
# What the output must hold.
EXPECTED = {
    "batch_left_padded.py": ["Paris", "24 times, for 4 tokens each"],
    "chat.py": ["Paris", "Rome"],
    "existing_script.py": ["Danube"],
    "ray_batch.py": ["2 results; actors: 1, each within"],
    "two_models_assisted.py": ["Paris", "40 tokens in"],
}


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    """A program without a terminal, where no checkout is found by itself."""
    return subprocess.run(
        [PYTHON, *map(str, arguments)],
        cwd=EXAMPLES,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=400,  # at a low priority, beside other tests
    )


def printed(*arguments: object) -> str:
    done = run(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_is_tested() -> None:
    """A new example needs a line above and one in the table that users read."""
    found = {path.name for path in EXAMPLES.glob("*.py")}
    assert found == set(EXPECTED)
    readme = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert all(f"({name})" in readme for name in [*found, "colab.ipynb"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["batch_left_padded.py", "chat.py"])
def test_example_runs(name: str, smollm2_bf16: Path) -> None:
    """On the demo's model."""
    output = printed(EXAMPLES / name, smollm2_bf16)
    assert all(words in output for words in EXPECTED[name])


@pytest.mark.slow
def test_two_models(smollm2_bf16: Path) -> None:
    """A draft saves passes, and both models together stay under the limit."""
    output = printed(EXAMPLES / "two_models_assisted.py", smollm2_bf16)
    assert all(words in output for words in EXPECTED["two_models_assisted.py"])
    passes = {name: int(count) for name, count in re.findall(r"(\w+): (\d+) passes", output)}
    assert 0 < passes["target"] < 40 - 10
    assert passes["draft"] > passes["target"]
    found = re.search(r"under (\d+) MB; .* is (\d+) MB", output)
    assert found is not None
    assert int(found[2]) <= int(found[1])


@pytest.mark.slow
def test_an_existing_script(smollm2_bf16: Path) -> None:
    """It prints the same when its model is streamed, under a limit that does not hold it."""
    script = EXAMPLES / "existing_script.py"
    code = script.read_text(encoding="utf-8").split('"""', 2)[2]  # after the docstring
    assert "def main" in code
    assert "pipeload" not in code
    plain = printed(script, smollm2_bf16)
    assert all(words in plain for words in EXPECTED["existing_script.py"])

    plan = json.loads(printed("-m", "pipeload", "plan", smollm2_bf16, "--json"))
    streamed = "-m", "pipeload", "--memory-limit"
    assert printed(*streamed, plan["smallest_limit"] * 11 // 10, script, smollm2_bf16) == plain
    refused = run(*streamed, plan["smallest_limit"] // 2, script, smollm2_bf16)
    assert refused.returncode == 1
    assert refused.stdout == ""
    assert "existing_script.py, line" in refused.stderr


def test_a_block_of_ray(smollm2_bf16: Path) -> None:
    """What an actor makes of its lines, without Ray: as `pipeload batch`, or the line's error."""
    spec = importlib.util.spec_from_file_location("ray_batch", EXAMPLES / "ray_batch.py")
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    lines = example.part_of(EXAMPLES / "requests.jsonl", "1/1")
    assert example.part_of(EXAMPLES / "requests.jsonl", "2/3") == [lines[1]]
    answering = example.Answering(str(smollm2_bf16), "2GB")
    body = {"prompt": "Water boils at", "model": smollm2_bf16.name, "max_completion_tokens": 3}
    more: list[dict[str, object]] = [{"temperature": 0, "user": "a"}, {"temperature": 2, "seed": 1}]
    for number, each in enumerate(more):
        asked = {"custom_id": str(number), "url": "/v1/completions", "body": body | each}
        lines.append({"line": json.dumps(asked)})
    block = {"line": [*(line["line"] for line in lines), "no JSON", "[]", "{}"]}
    results = [json.loads(result) for result in answering(block)["result"]]
    named = ["river", "poem", "boils", "wrong", "0", "1", None, None, None]
    assert [result["custom_id"] for result in results] == named
    answers = [result["response"] for result in results]
    codes = [200, 200, 200, 400, 200, 200, 400, 400, 400]
    assert [one["status_code"] for one in answers] == codes
    assert answers[3]["body"]["error"]["message"] == "stream=True is not served. Leave it out."
    assert "." not in answers[2]["body"]["choices"][0]["text"]
    prompt = answering._settings.tokenizer(body["prompt"], return_tensors="pt")
    wanted = answering._model.generate(**prompt, max_new_tokens=3, do_sample=False)
    told = answering._settings.tokenizer.decode(wanted[0, prompt["input_ids"].shape[1] :])
    assert answers[4]["body"]["choices"][0]["text"] == told
    answering._model.pipeload.remove()


@pytest.mark.slow
def test_ray(smollm2_bf16: Path, tmp_path: Path) -> None:
    """A part of the file on one actor; where Ray is."""
    if run("-c", "import ray.data").returncode:
        pytest.skip("ray is missing: pip install 'ray[data]'")
    results = tmp_path / "results"
    arguments = [EXAMPLES / "requests.jsonl", results, "--model", smollm2_bf16, "--shard", "1/2"]
    output = printed(EXAMPLES / "ray_batch.py", *arguments)
    assert all(words in output for words in EXPECTED["ray_batch.py"])
    assert len(results.read_text().splitlines()) == 2
