"""Who is in the run: membership (pure), and the coordinator, agents and worker sessions that act on it.

Start reading at `membership.react.react` for the decisions and at `agent.agent.run_agent` for what performs them;
docs/protocols/control-plane.md tells the whole story with its assumptions.
"""
