"""Other people's programs under `python -m pipeload`: the same output, within the limit.

    make clients
    python -m tests.tools.clients smollm2 [--only sentences]

sentence-transformers (`encode` and a cross-encoder's `predict`, on random models made here),
lm_eval with `--batch_size auto` on a task made here, and `accelerate launch`. Each runs plainly,
then with a limit of 1 MB, which says the smallest one, then with that and a little more. Needs what
`pip install '.[clients]'` installs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from pipeload._sizes import parse_size

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
ROOT = SCRIPTS.parent.parent
_SPARE_BYTES = 60_000_000
"""Over the smallest limit: what these programs take while their models run."""
_MODULE = ("-m", "accelerate.commands.accelerate_cli", "launch", "--cpu", "--num_processes", "1")
_TASK = """\
task: spare_words
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: [" yes", " no", " perhaps"]
doc_to_target: answer
metric_list:
  - metric: acc
  - metric: acc_norm
"""


class Done(NamedTuple):
    status: int
    out: str
    err: str
    peak: int
    """Bytes, the most that it or one of its children held."""


class Client(NamedTuple):
    """Words for Python, and where among them those of `-m pipeload` go."""

    before: tuple[str, ...]
    words: tuple[str, ...]


def run(words: list[str], place: Path) -> Done:
    """Run Python with these words."""
    cache = {name: str(place / name) for name in ("HF_HOME", "HF_DATASETS_CACHE")}
    imports = os.pathsep.join([str(ROOT), str(ROOT / "hooks")])
    settings = {"PYTHONPATH": imports, "HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "passive"}
    with (place / "out").open("w+") as out, (place / "err").open("w+") as err:
        child = subprocess.Popen(
            [sys.executable, "-W", "ignore", *words],
            cwd=place,
            env={**os.environ, **settings, **cache},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
        )
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        err.seek(0)
        return Done(child.returncode, out.read(), err.read(), usage.ru_maxrss * 1024)


def make_clients(place: Path, model: Path) -> dict[str, Client]:
    """What is run, with the models and the task that it needs."""
    code = f"from tests.tools.clients import make_encoders; make_encoders({str(place)!r})"
    made = run(["-c", code], place)  # apart: a child's peak begins with its parent's size
    if made.status:
        sys.exit(made.err)
    data = place / "words.jsonl"
    # Not always the first: then a model that is right, or wrong, by chance would be so throughout.
    rows = [
        {"question": f"Is {n} more than {n // 2}? Answer:", "answer": n % 3} for n in range(12, 40)
    ]
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (place / "tasks").mkdir()
    (place / "tasks" / "words.yaml").write_text(_TASK.format(data=data))
    arguments = f"pretrained={model},dtype=bfloat16"
    evaluation = ("--model", "hf", "--model_args", arguments, "--tasks", "spare_words")
    options = ("--include_path", str(place / "tasks"), "--batch_size", "auto", "--device", "cpu")
    sentences = str(SCRIPTS / "client_sentences.py")
    return {
        "sentences": Client((), (sentences, str(place / "encoder"), str(place / "judge"))),
        "lm_eval": Client((), ("-m", "lm_eval", *evaluation, *options)),
        "accelerate": Client(_MODULE, (str(SCRIPTS / "generate.py"), str(model))),
    }


def make_encoders(folder: str) -> None:
    """Random models of sentences and of pairs, 100 MB each."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification, BertModel

    from tests.support.users import words

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=512,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=8,
        num_attention_heads=8,
    )
    config.num_labels = 1
    for name, kind in (("encoder", BertModel), ("judge", BertForSequenceClassification)):
        kind(config).save_pretrained(Path(folder) / name)
        words().save_pretrained(Path(folder) / name)


def check(client: Client, place: Path) -> str:
    """What is wrong; empty if nothing is."""
    plain = run([*client.before, *client.words], place)
    if plain.status:
        return f"plain ended with {plain.status}: {plain.err[-2000:]}"

    def streamed(limit: int) -> Done:
        way = ("-m", "pipeload", "--stats", "--memory-limit", str(limit))
        return run([*client.before, *way, *client.words], place)

    said = re.search(r"smallest limit that works here is (\d+) bytes", streamed(1_000_000).err)
    if said is None:
        return "a limit of 1 MB was not refused"
    limit = int(said[1]) + _SPARE_BYTES
    done = streamed(limit)
    if done.status:
        return f"ended with {done.status} at a limit of {limit}: {done.err[-2000:]}"
    if re.search(r"^read( from disk)? +[1-9]", done.err, re.MULTILINE) is None:
        return f"nothing was streamed: {done.err[-2000:]}"
    if _without_batch(done.out) != _without_batch(plain.out):
        return f"other output:\n{plain.out}\n{done.out}"
    held = peak_since_load(done.err)
    sizes = ", ".join(
        f"{what} {size / 1e6:.0f} MB"
        for what, size in (
            ("held", held),
            ("limit", limit),
            ("with imports", done.peak),
            ("plain", plain.peak),
        )
    )
    print(f"  {sizes}", flush=True)
    return "" if 0 < held <= limit else f"over the limit: {sizes}"


def _without_batch(out: str) -> str:
    """Without the batch that was found to fit, which is what a limit may change."""
    return re.sub(r"(batch.size: (?:auto \()?)\d+", r"\1", out)


def peak_since_load(told: str) -> int:
    """The most bytes that `--stats` says of any model; 0 where it says nothing.

    What imports held before is not among them: library pages, which the kernel takes back.
    """
    found = re.findall(r"^peak since load +(\S+ \S+)$", told, re.MULTILINE)
    return max(map(parse_size, found), default=0)


def main() -> None:
    """Run all; the exit status tells whether anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="folder made by `pipeload demo --folder FOLDER`")
    parser.add_argument("--only", help="one of sentences, lm_eval, accelerate")
    options = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        for name, client in make_clients(place, options.model.resolve()).items():
            if options.only in {None, name}:
                print(name, flush=True)
                wrong = check(client, place)
                failed += bool(wrong)
                print(f"  {wrong or 'ok'}", flush=True)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
