"""How a model is trained: the settings that a user writes, and the engines. The loop knows only the verbs of `base`.

May import `spec`, `comm`, `data`, `checkpoint`, `parallel`, `embedding` and `parameter_server.worker`.
Start reading at `registry.STRATEGIES`.
"""
