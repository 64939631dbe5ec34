"""The agent's handle of this host's backup process: started when a run needs one, and restarted when it dies.

The run does not depend on it. The kernel has all bytes that it has acknowledged, so its successor continues from there.
"""

from __future__ import annotations

import msgspec

from manyhands.control.processes.child_process import ChildProcess
from manyhands.control.security.keys import weights_client_curve, weights_server_curve
from manyhands.control.servers.backup_server import BackupConfig
from manyhands.control.servers.server_ports import reserve_port, tcp_endpoint

__all__ = ["BackupProcess"]

# The disk may be slow.
END_S = 30.0


class BackupProcess:
    def __init__(self, run_dir: str, address: str, key: bytes | None) -> None:
        """`address`: of this host. Servers that write to it need the run's key, too."""
        self._reserved = reserve_port(address)  # so that a successor gets the same port
        self.endpoint = tcp_endpoint(address, self._reserved.getsockname()[1])
        config = BackupConfig(
            run_dir=run_dir,
            endpoint=self.endpoint,
            curve=weights_server_curve(key) if key is not None else None,
            clients=weights_client_curve(key).public if key is not None else b"",
        )
        self._child = ChildProcess("manyhands.control.servers.backup_server", msgspec.msgpack.encode(config))

    @property
    def pid(self) -> int:
        return self._child.pid

    def tend(self) -> str | None:
        """Restart it if it has died; returns a warning about that."""
        if not self.endpoint or self._child.is_alive:
            return None
        if not self._child.restart():
            self.endpoint = ""
            return f"the backup of other hosts' logs is given up; its last output: {self._child.last_output}"
        return "the backup of other hosts' logs died; restarting it, no data was lost"

    def close(self) -> None:
        self._child.close(END_S)
        self._reserved.close()
