"""What a script can see of how it was started."""

import os
import sys

os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
print(__name__, __file__, __package__, __spec__ and __spec__.name, type(__loader__))
print(sys.argv, sys.path[0], sys.modules["__main__"].__dict__ is globals())
print([name for name in ("torch", "transformers", "numpy") if name in sys.modules])
if sys.argv[1:2] == ["raise"]:
    raise LookupError("the script's own")
if sys.argv[1:2] == ["wait"]:
    print("waiting", flush=True)
    sys.stdin.read()
