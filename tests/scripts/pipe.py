"""A pipeline that loads its own model."""

import sys

from transformers import pipeline

generator = pipeline("text-generation", model=sys.argv[1], device_map="auto")
for result in generator(["The sun is", "Water is"], max_new_tokens=6, do_sample=False):
    print(result[0]["generated_text"])
