"""Short runs of the user's script that answer a question: `mh tune`, `mh check`, `mh profile`.

May import `spec`, `checkpoint`, `strategies`, `control`, `observe`, `launcher`, `planner`, `profiling` and
`training.loop`.
Start reading at `trial_runner.tune`.
"""
