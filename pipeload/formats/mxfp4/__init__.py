"""MXFP4: the floats of gpt-oss."""
