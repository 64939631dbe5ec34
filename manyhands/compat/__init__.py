"""The calls of other libraries, kept as their users type them: a folder for each library.

What they mean is decided by that library; what is computed, by which worker and how it is checkpointed, by
manyhands. May import `training.driven_training`, which such calls are built on, and public names. Start reading at
`keras`.
"""
