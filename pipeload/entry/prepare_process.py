"""What a process is made to be before a plan that is to be carried out is made for it."""

from __future__ import annotations

import torch

from pipeload.system.memory import keep_few_kernels, return_freed_memory


def prepare_process() -> None:
    """Give back memory that is free, and have the libraries keep and do what a plan counts on."""
    return_freed_memory()
    keep_few_kernels()
    call_vector_functions()


def call_vector_functions() -> None:
    """Have MKL set up its vector functions in one thread.

    The first large `cos()` or `sin()` of a process, with two threads, is now and then wrong in the
    half of one of them, by up to 1.5e-4: in 5 of 850 fresh processes of torch alone. After a small
    one, which one thread computes, it was right in 400 of 400.
    """
    one = torch.zeros(1)
    for function in (torch.cos, torch.sin, torch.exp):
        function(one)
