"""Say which of the models that a script loads are streamed."""

import sys
from threading import Thread

from transformers import AutoModelForCausalLM, pipeline


def show(name, model):
    streamed = hasattr(model, "pipeload")
    print(name, streamed, streamed and model.pipeload.plan.bytes_per_pass > 0)


def load():
    show("thread", AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto"))


show("auto", AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto", device_map="auto"))
show("pipeline", pipeline("text-generation", model=sys.argv[1], device_map="auto").model)
thread = Thread(target=load)
thread.start()
thread.join()
