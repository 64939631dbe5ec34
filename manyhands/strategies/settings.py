"""Settings that all strategies share: devices, threads, precision and memory of the workers."""

from __future__ import annotations

import msgspec

from manyhands.errors import SpecError

__all__ = ["LEVELS", "StrategySettings", "at_least", "in_words", "one_of"]

LEVELS = ("optimizer", "gradients", "parameters")
"""What is sharded over replicas: the optimizer state, gradients too, or parameters as well."""


class StrategySettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that all strategies share; documented in `mh.Single`."""

    devices: tuple[str, ...] | None = None
    threads: int | None = None
    dtypes: dict[str, str] | None = None
    recompute: str | tuple[str, ...] | None = None
    memory_limit: int | str | None = None

    @property
    def on_servers(self) -> bool:
        """Whether server processes store the weights, or some of them."""
        return False

    @property
    def leases(self) -> bool:
        """Whether servers lease batches to workers; else workers divide each batch, and synchronise in every step."""
        return False

    @property
    def lease_mode(self) -> str:
        """Where servers lease batches: the setting that chooses it, as a user writes it."""
        raise AssertionError("servers lease no batches")

    @property
    def without_leases(self) -> str:
        """Where servers lease batches: what to write so that they do not."""
        raise AssertionError("servers lease no batches")

    @property
    def waits_for_all(self) -> bool:
        """Whether every step has the slices of all workers before the next begins: then results are reproducible."""
        return not self.leases

    def keeps_spare(self, num_hosts: int) -> bool:
        """Whether a spare server process is kept ready."""
        return False

    @property
    def takes_local_steps(self) -> bool:
        """Whether a worker leases several batches at a time, and trains its own copy of the weights on them."""
        return False


def one_of(name: str, value: str, known: tuple[str, ...], where: str) -> None:
    if value not in known:
        raise SpecError(f"{name} is {value!r}.", where=where, fix=[f'{name}="{one}"' for one in known])


def at_least(name: str, value: int | None, least: int, where: str) -> None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    if value is not None and not (whole and value >= least):
        raise SpecError(
            f"{name} is {value!r}, but must be a whole number from {least} on.", where=where, fix=[f"{name}={least}"]
        )


def in_words(level: str) -> str:
    """What is sharded at one of `LEVELS`."""
    return ", ".join(reversed(("optimizer state", "gradients", "parameters")[: LEVELS.index(level) + 1]))
