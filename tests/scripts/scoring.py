"""The likelihood of texts."""

import torch


def score(model, tokenizer, texts):
    """The sum of each text's log-probabilities, and how many tokens that are."""
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    ids, mask = batch["input_ids"], batch["attention_mask"]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.inference_mode():
        logits = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits
    logs = torch.log_softmax(logits[:, :-1].float(), dim=-1)
    chosen = logs.gather(-1, ids[:, 1:, None])[..., 0] * mask[:, :-1]
    return chosen.sum(-1).tolist(), (mask.sum(-1) - 1).tolist()
