"""Every message of the control plane, as data; what sends and receives them is in the folders beside this one.

May import `spec` and `comm`.
Start reading at `worker_messages.WorkerHello`.
"""
