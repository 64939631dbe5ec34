"""The data-flow graph of a script's model for `mh graph`: capture, folding and layout (pure), pictures.

May import everything up to `profiling` in the order of tests/guards/test_layers.py.
Start reading at `graph.DataflowGraph` and `capture.capture`.
"""
