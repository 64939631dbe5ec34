"""The parts that strategies are made of, one folder for each concept; this folder has no module.

May import only modules of the root, such as `errors`.
Start reading at `gradients.network_sum.GradientSum`.
"""
