"""How a model is trained: one file per strategy, none imports another. The loop knows only the verbs of `base`."""
