"""What a parameter server's process does where a worker would begin to train: it serves until the run ends.

Servers run the script from the top, as workers do, up to `Trainer(...)` or `Hands.setup`; `serve` is called there with
what the script made, and never returns.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NoReturn

from manyhands.control.session import RunFacts, Session
from manyhands.runtime.models import Parts
from manyhands.runtime.worker import Worker

__all__ = ["serve"]


def serve(worker: Worker, parts: Parts, scheduler: Callable[[Any], Any] | None) -> NoReturn:
    """Join the run, and end the process with 0 when the run has no more use for it."""
    session, spec = worker.session, worker.resolved.spec
    assert isinstance(session, Session)
    worker.settle_in(
        RunFacts(
            run_dir=spec.run.run_dir,
            overwrite=spec.run.overwrite,
            strategy=worker.strategy.name,
            precision=spec.train.precision,
            script=sys.argv[0],
        )
    )
    session.await_stop()
    worker.close()
    raise SystemExit(0)
