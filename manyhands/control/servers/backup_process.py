"""This host's backup as its agent sees it: started when a run wants one, and again when it dies.

The run does not depend on it. What it has acknowledged is the kernel's, so the next one goes on where it was.
"""

from __future__ import annotations

import time

import msgspec

from manyhands.control.processes.child_process import Child
from manyhands.control.security.keys import weights_client_curve, weights_server_curve
from manyhands.control.servers.backup_server import BackupConfig
from manyhands.control.servers.server_ports import hold, tcp_endpoint

__all__ = ["BackupProcess"]

# One that has died so often, and never lived for so long, is not started again.
MAX_QUICK_DEATHS = 5
QUICK_S = 5.0
# The disk may be slow.
END_S = 30.0


class BackupProcess:
    def __init__(self, run_dir: str, address: str, key: bytes | None) -> None:
        """`address`: of this host. Whoever writes to it has the run's key, too."""
        self._held = hold(address)  # so that the next one gets the same port
        self.endpoint = tcp_endpoint(address, self._held.getsockname()[1])
        config = BackupConfig(
            run_dir=run_dir,
            endpoint=self.endpoint,
            curve=weights_server_curve(key) if key is not None else None,
            clients=weights_client_curve(key).public if key is not None else b"",
        )
        self._child = Child("manyhands.control.servers.backup_server", msgspec.msgpack.encode(config))
        self._quick_deaths = 0

    @property
    def pid(self) -> int:
        return self._child.pid

    def tend(self) -> str | None:
        """Start it again if it has died; what there is to say of that."""
        child = self._child
        if not self.endpoint or child.is_alive:
            return None
        self._quick_deaths = self._quick_deaths + 1 if time.monotonic() - child.started_at < QUICK_S else 0
        child.kill()
        if self._quick_deaths >= MAX_QUICK_DEATHS:
            self.endpoint = ""
            return f"the backup of other hosts' logs is given up; it said: {child.tail.decode(errors='replace')}"
        child.start()
        return "the backup of other hosts' logs died; starting it again, it lost nothing"

    def close(self) -> None:
        self._child.close(END_S)
        self._held.close()
