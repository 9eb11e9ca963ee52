"""Work that is spread over processes which start anew and import this file."""

import multiprocessing
import os
import sys


def square(number):
    return number * number, os.path.basename(sys.modules[square.__module__].__file__)


if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        print(pool.map(square, range(4)))
