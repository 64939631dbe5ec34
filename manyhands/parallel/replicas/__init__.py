"""The messages that replicas exchange in every step, straggler detection, and checks that their copies are equal.

May import `native`, `comm`, `parallel.model` and `parallel.gradients`.
Start reading at `step_exchange.StepExchange`.
"""
