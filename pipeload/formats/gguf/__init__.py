"""GGUF: blocks of values in the files of llama.cpp."""
