"""Settings, the cluster and the placement of workers as frozen data, without torch; the one reader of the environment.

May import only modules of the root, such as `errors`.
Start reading at `load.resolve`.
"""
