"""What is trained: workloads by name, their models and data, and the programs of torch and of ours that train them.

May import `driver`. Start reading at `workloads.WORKLOADS`.
"""
