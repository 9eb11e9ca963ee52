"""Continue a few prompts, greedily, by sampling, and in a pipeline that loads its own model."""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

path = sys.argv[1]
tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
model = AutoModelForCausalLM.from_pretrained(path, dtype="auto", device_map="auto")

for prompt in ("The capital of France is", "Two and two is"):
    inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
    output = model.generate(**inputs, max_new_tokens=6, do_sample=False)
    print(tokenizer.decode(output[0], skip_special_tokens=True))

torch.manual_seed(4)
inputs = tokenizer(
    ["A river", "The names of the largest rivers"], padding=True, return_tensors="pt"
)
output = model.generate(**inputs, max_new_tokens=6, do_sample=True, top_k=20)
for line in tokenizer.batch_decode(output, skip_special_tokens=True):
    print(repr(line))
print(output.tolist())

del model
generator = pipeline("text-generation", model=path, device_map="auto")
for result in generator(["The sun is", "Water is"], max_new_tokens=6, do_sample=False):
    print(result[0]["generated_text"])
