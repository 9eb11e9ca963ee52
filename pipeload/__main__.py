"""`python -m pipeload run ...` is `pipeload run ...`."""

from pipeload.cli import main

if __name__ == "__main__":
    main()
