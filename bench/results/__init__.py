"""From measured blocks to verdicts, tables and a picture, and the list of targets. No torch, no processes.

May import nothing else of bench. Start reading at `table.ROWS`, then `compare.judge`.
"""
