def touched_outside(model):
    return frozenset()
