"""A Gemma 3 in fp32 whose head is cut: lookup, beams and padded batches, plain and at some limits.

    python cut_head.py FOLDER VOCABULARY... [as-intel]

Prints for each vocabulary of how many ranges the head is, and which ways and batches differ.
"""

import sys
from pathlib import Path

import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

import pipeload
from tests.tools.rows_sweep import as_intel

if "as-intel" in sys.argv:
    print("as Intel's:", as_intel())
torch.set_num_threads(2)


def answers(model, ids, ways):
    told = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        for name, given in ways.items():
            options = {**told, **given, "return_dict_in_generate": True, "output_logits": True}
            found = model.generate(**options)
            yield name, found.sequences, torch.stack(found.logits)
        for rows in (1, 3, 4, 9, 15, 16, 17):
            yield f"{rows} rows", ids[:1], model(ids.view(-1)[:rows, None]).logits


def compare(folder, vocabulary):
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=vocabulary,
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        layer_types=["sliding_attention", "full_attention"],
    )
    Gemma3ForCausalLM(config).save_pretrained(folder)
    ids = torch.randint(3, vocabulary, (5, 12))
    ids[:, 6:] = ids[:, :6]  # a lookup finds something
    mask = torch.ones_like(ids)
    for row in range(5):
        mask[row, :row] = 0
    ways = {
        "lookup": {"input_ids": ids[:1], "prompt_lookup_num_tokens": 8},
        "beams": {"input_ids": ids[:2], "num_beams": 3},
        "padded": {"input_ids": ids, "attention_mask": mask},
    }
    wanted = list(answers(Gemma3ForCausalLM.from_pretrained(folder).eval(), ids, ways))
    options = {"tokens": 64, "batch": 17}
    smallest = pipeload.smallest_limit(folder, **options)
    for spare in (0, 10_000_000):
        model = pipeload.from_pretrained(folder, memory_limit=smallest + spare, **options)
        units = sum("lm_head" in unit.name for unit in model.pipeload.plan.units)
        bad = [
            name
            for (name, *got), (_, *plain) in zip(answers(model, ids, ways), wanted, strict=True)
            if not all(map(torch.equal, got, plain))
        ]
        print(f"{units} ranges of the head, differ:", bad)
        del model


for number in sys.argv[2:]:
    if number.isdigit():
        compare(Path(sys.argv[1]) / number, int(number))
