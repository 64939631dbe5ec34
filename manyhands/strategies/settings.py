"""What every strategy's settings have: where workers compute, in which types, and in how much memory."""

from __future__ import annotations

import msgspec

from manyhands.errors import SpecError

__all__ = ["LEVELS", "Settings", "at_least", "in_words", "one_of"]

LEVELS = ("optimizer", "gradients", "parameters")
"""What is divided over replicas: the optimizer's states, gradients too, or parameters as well."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What all strategies have; `mh.Single` explains it."""

    devices: tuple[str, ...] | None = None
    threads: int | None = None
    dtypes: dict[str, str] | None = None
    recompute: str | tuple[str, ...] | None = None
    memory_limit: int | str | None = None

    @property
    def on_servers(self) -> bool:
        """Whether weights, or some of them, are kept by server processes."""
        return False

    @property
    def leases(self) -> bool:
        """Whether servers hand out batches; else workers share out each one, and meet in every step."""
        return False

    def keeps_spare(self, num_hosts: int) -> bool:
        """Whether a server more than needed is kept ready."""
        return False

    @property
    def takes_local_steps(self) -> bool:
        """Whether a worker that leases batches takes several at a time, and trains weights of its own on them."""
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
    """What is divided at one of `LEVELS`."""
    return ", ".join(reversed(("optimizer's states", "gradients", "parameters")[: LEVELS.index(level) + 1]))
