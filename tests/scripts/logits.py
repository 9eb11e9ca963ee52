"""A digest of every bit of a prompt's logits, and of what is generated from it."""

import hashlib
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto")
inputs = tokenizer("The three longest rivers of Europe are", return_tensors="pt")
with torch.no_grad():
    logits = model(**inputs).logits
print(tuple(logits.shape), hashlib.sha256(logits.float().numpy().tobytes()).hexdigest())
print(model.generate(**inputs, max_new_tokens=3, do_sample=False).tolist())
