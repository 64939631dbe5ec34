"""Observing a run: its recorded events, progress display, status, TensorBoard. Imports no torch.

May import `spec` and `control`.
Start reading at `recorder.Recorder`.
"""
