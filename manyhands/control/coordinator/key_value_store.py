"""The run's key-value stores, one for each generation: pure bookkeeping of values and of requests that wait for them.

Bounded in keys, bytes and waiters. The coordinator passes in requests with the time, and sends the replies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from manyhands.control.messages.worker_messages import StoreReply, StoreRequest

__all__ = ["Client", "KeyValueStore", "Stores", "generation_is_over"]

MAX_KEYS = 100_000
MAX_BYTES = 64 * 2**20
MAX_WAITERS = 20_000
MAX_KEY_CHARS = 512
MAX_WAIT_S = 24 * 3600.0

Client = tuple[str, bytes]
"""Where a reply goes: which port, and which peer on it."""


def generation_is_over(generation: str) -> str:
    """The reply to a request for a generation that is not this store's."""
    return f"generation {generation} is over"


class _Waiter(msgspec.Struct):
    client: Client
    request: StoreRequest
    until: float


class KeyValueStore:
    def __init__(self, generation: str | None = None) -> None:
        self.generation = generation
        self._values: dict[str, bytes] = {}
        self._bytes = 0
        self._waiters: list[_Waiter] = []

    def handle(self, client: Client, request: StoreRequest, now: float) -> Iterator[tuple[Client, StoreReply]]:
        """Replies that are due because of this request: to it, and to requests that waited for what it set."""
        error = self._objection(request)
        if error:
            yield client, StoreReply(ticket=request.ticket, ok=False, error=error)
        elif request.op in ("get", "wait"):
            waiter = _Waiter(client, request, now + min(request.timeout_s, MAX_WAIT_S))
            if (reply := self._answer(waiter, now)) is not None:
                yield client, reply
            else:
                self._waiters.append(waiter)
        else:
            yield client, self._change(request)
            yield from self.due(now)

    def due(self, now: float) -> Iterator[tuple[Client, StoreReply]]:
        """Replies to waiting requests whose keys are set or whose time is up."""
        waiting = []
        for waiter in self._waiters:
            reply = self._answer(waiter, now)
            if reply is None:
                waiting.append(waiter)
            else:
                yield waiter.client, reply
        self._waiters = waiting

    def close(self) -> Iterator[tuple[Client, StoreReply]]:
        """Refusals to all waiting requests: the generation is over."""
        for waiter in self._waiters:
            error = generation_is_over(self.generation or "")
            yield waiter.client, StoreReply(ticket=waiter.request.ticket, ok=False, error=error)
        self._waiters = []

    def put_back(self, generation: str, values: dict[str, bytes]) -> None:
        """Restore values that an agent kept while no coordinator ran; values that are already here are newer."""
        if generation != self.generation:
            return
        for key, value in values.items():
            if key not in self._values and self._fits(key, value):
                self._store(key, value)

    def _objection(self, request: StoreRequest) -> str:
        if request.generation != self.generation:
            return generation_is_over(request.generation)
        if not request.keys or any(not key or len(key) > MAX_KEY_CHARS for key in request.keys):
            return f"a key must have 1 to {MAX_KEY_CHARS} characters"
        if request.op in ("get", "wait") and len(self._waiters) >= MAX_WAITERS:
            return f"{MAX_WAITERS} requests are already waiting"
        if request.op in ("set", "add") and not self._fits(request.keys[0], request.value):
            return f"the store is full ({len(self._values)} keys, {self._bytes} bytes)"
        return ""

    def _fits(self, key: str, value: bytes) -> bool:
        return (key in self._values or len(self._values) < MAX_KEYS) and self._bytes + len(value) <= MAX_BYTES

    def _answer(self, waiter: _Waiter, now: float) -> StoreReply | None:
        request = waiter.request
        missing = [key for key in request.keys if key not in self._values]
        if not missing:
            value = self._values[request.keys[0]] if request.op == "get" else b""
            return StoreReply(ticket=request.ticket, ok=True, value=value)
        if now >= waiter.until:
            error = f"timeout: {', '.join(missing[:3])} not set within {request.timeout_s:g} s"
            return StoreReply(ticket=request.ticket, ok=False, error=error)
        return None

    def _change(self, request: StoreRequest) -> StoreReply:
        key, number = request.keys[0], 0
        match request.op:
            case "set":
                self._store(key, request.value)
            case "add":
                try:
                    number = int(self._values.get(key, b"0")) + request.amount
                except ValueError:
                    return StoreReply(ticket=request.ticket, ok=False, error=f"{key} does not hold a number")
                self._store(key, str(number).encode())
            case "check":
                number = int(all(key in self._values for key in request.keys))
            case "delete":
                value = self._values.pop(key, None)
                number, self._bytes = int(value is not None), self._bytes - len(value or b"")
        return StoreReply(ticket=request.ticket, ok=True, number=number)

    def _store(self, key: str, value: bytes) -> None:
        self._bytes += len(value) - len(self._values.get(key, b""))
        self._values[key] = value


class Stores:
    """The stores of the generations that are open to members. A request for any other is refused as over."""

    def __init__(self) -> None:
        self._open: dict[str, KeyValueStore] = {}

    def keep(self, generations: Sequence[str]) -> Iterator[tuple[Client, StoreReply]]:
        """Open these, close all others."""
        closed = [store for generation, store in self._open.items() if generation not in generations]
        self._open = {generation: self._open.get(generation) or KeyValueStore(generation) for generation in generations}
        for store in closed:
            yield from store.close()

    def handle(self, client: Client, request: StoreRequest, now: float) -> Iterator[tuple[Client, StoreReply]]:
        return self._open.get(request.generation, KeyValueStore()).handle(client, request, now)

    def due(self, now: float) -> Iterator[tuple[Client, StoreReply]]:
        for store in self._open.values():
            yield from store.due(now)

    def put_back(self, generation: str, values: dict[str, bytes]) -> None:
        if generation in self._open:
            self._open[generation].put_back(generation, values)
