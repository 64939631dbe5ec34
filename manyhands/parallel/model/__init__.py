"""What every strategy does to the user's model: buffers, precision, blocks, activation checkpointing.

May import `spec`, `comm` and `checkpoint`.
Start reading at `step_buffers.StepBuffers`.
"""
