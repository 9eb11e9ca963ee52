"""Two turns of a chat, the answers shown as they come."""

import sys
from threading import Thread

from transformers import AutoModelForCausalLM, AutoTokenizer, TextIteratorStreamer

model_name = sys.argv[1]
tokenizer = AutoTokenizer.from_pretrained(model_name)
model = AutoModelForCausalLM.from_pretrained(model_name, torch_dtype="auto", low_cpu_mem_usage=True)
model.eval()

messages = []
for question in ("What is the capital of France?", "And of Italy?"):
    print(f"> {question}")
    messages.append({"role": "user", "content": question})
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    options = {**inputs, "streamer": streamer, "max_new_tokens": 12, "do_sample": False}
    thread = Thread(target=model.generate, kwargs=options)
    thread.start()
    answer = ""
    for text in streamer:
        print(text, end="", flush=True)
        answer += text
    thread.join()
    print()
    messages.append({"role": "assistant", "content": answer})
