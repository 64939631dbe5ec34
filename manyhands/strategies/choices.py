"""The names a user writes to say how a model is trained: plain settings.

Who does the work is in `replicated` and, for `LocalSGD`, in `local_sgd`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from manyhands.errors import SpecError
from manyhands.strategies.settings import LEVELS, Settings, at_least, in_words, one_of

__all__ = ["CentralStorage", "LocalSGD", "Mirrored", "MultiWorker", "ParameterServer", "Sharded", "Single"]

MODES = ("sync", "async", "ssp", "hybrid")
# A worker that hears nothing from servers for twice as long gives up.
LONGEST_DEADLINE_S = 300.0
DURABILITIES = ("upstream", "wal", "replica", "snapshot")


class Single(Settings, frozen=True, kw_only=True):
    """One worker. The promise of the other strategies is to end where this one ends.

    What `devices`, `threads`, `dtypes`, `recompute` and `memory_limit` mean here they mean in every strategy.

    Args:
        devices: One device per worker of this host, such as ("cuda:0", "cuda:1"); a single name is for all of them. A
            device that the machine lacks is replaced by the CPU, with a warning. Default: accelerators, else the CPU.
        threads: Threads per worker. Default: cores / workers; with `exact=True`, 1. `mh tune` measures what is fastest.
        dtypes: Layers that compute in a type of their own, whatever the precision: patterns of names, and "fp64",
            "fp32", "bf16" or "fp16". For layers that lose too much in half precision: {"*norm*": "fp32"}.
        recompute: Layers whose activations are not kept but computed again in backward: "blocks", or patterns of names.
            Saves memory, and costs a second forward pass through them; the same bits. Default: none.
        memory_limit: Of each worker, in bytes or as "2GB". The memory that the layout needs is predicted before it
            starts, and a layout that needs more is refused. The interpreter, torch and the program count. Default:
            none.
    """

    name = "single"


class Mirrored(Settings, frozen=True, kw_only=True):
    """Replicas on one host, one per worker. The default.

    Args:
        workers: How many. Default: one per accelerator; without accelerators, one. `mh run -n` wins over it.
        reducer: How gradients travel: "exact" (the default), "bf16" in half the bytes, or "int8" in a quarter. The last
            two round, so that results depend on the number of workers; for links that are slower than the computation.
        elastic: (least, most) workers: they may die, come and go while the others train. Default: a worker that is lost
            takes the run back to its last checkpoint.
        devices, threads, dtypes, recompute, memory_limit: where, with what and in how much memory workers compute; see
            `mh.Single`.
    """

    workers: int | None = None
    reducer: str | None = None
    elastic: tuple[int, int] | None = None
    name = "mirrored"


class MultiWorker(Settings, frozen=True, kw_only=True):
    """Replicas on many hosts.

    Args:
        workers: Workers on each host. Default: one per accelerator; without accelerators, one.
        cluster: A `mh.Server`, which says which task of which cluster this process is. Default: what the launcher or
            TF_CONFIG says.
        reducer: How gradients travel: "exact" (the default), in half the bytes ("bf16") or in a quarter ("int8").
        elastic: (least, most) workers over all hosts; hosts come and go, too. Default: they may not.
        devices, threads, dtypes, recompute, memory_limit: where, with what and in how much memory workers compute; see
            `mh.Single`.
    """

    workers: int | None = None
    cluster: Any = None
    reducer: str | None = None
    elastic: tuple[int, int] | None = None
    name = "multi_worker"


class CentralStorage(Settings, frozen=True, kw_only=True):
    """Weights once in the host's memory, updated once; the workers of that host compute with them.

    Args:
        workers: How many. Default: one per accelerator; without accelerators, one.
        devices, threads, dtypes, recompute, memory_limit: where, with what and in how much memory workers compute; see
            `mh.Single`.
    """

    workers: int | None = None
    name = "central_storage"


class _Level(Settings, frozen=True):
    level: str = "parameters"


class Sharded(_Level, frozen=True, kw_only=True):
    """Replicas whose memory is divided over the workers. (ZeRO 1, 2 and 3; FSDP.)

    Workers that share memory have one copy of the weights, and states and sums of gradients in parts, at the first two
    levels alike. At "parameters", and where no memory is shared, each worker has a part of everything, and gathers the
    rest while it computes: block by block, or at the lower levels once per step.

    Args:
        level: What is divided over the workers: the "optimizer"'s states, "gradients" too, or "parameters" as well (the
            default). A higher level takes less memory and more communication.
        offload: Where shards wait while they are not in use: None, on the device, or "host", in the host's memory. For
            accelerators that are short of memory.
        recompute: Layers whose activations are not kept but computed again in backward: "blocks", or patterns of names.
            Costs about a third more computation, for activations that do not fit. Default: none.
        workers: Workers on each host. Default: one per accelerator; without accelerators, one.
        cluster: As `mh.MultiWorker` has it.
        devices, threads, dtypes, memory_limit: where, with what and in how much memory workers compute; see
            `mh.Single`.
    """

    offload: str | None = None
    workers: int | None = None
    cluster: Any = None
    name = "sharded"

    def __post_init__(self) -> None:
        one_of("level", self.level, LEVELS, "mh.Sharded")
        if self.offload not in (None, "host"):
            raise _wrong(f"offload is {self.offload!r}", 'offload="host"', "offload=None", where="mh.Sharded")

    @property
    def divided(self) -> str:
        """In words, for the run's first line."""
        return in_words(self.level)


class ParameterServer(Settings, frozen=True, kw_only=True):
    """Weights on servers, processes of their own, to which workers push gradients and from which they pull.

    Args:
        servers: How many server processes. Default: 2.
        mode: "async" (the default): each worker takes a batch at a time, and its gradient is applied when it arrives.
            "sync": the slices of a batch are shared out and applied together, as `mh.Mirrored` does. "ssp": the same,
            but a slice of step t may be computed with weights that lack the last `staleness` steps before it. "hybrid":
            dense weights as `mh.Mirrored` has them, and only rows of `mh.Embedding` and `mh.EmbeddingBag` on servers.
        staleness: Of ssp, in steps; 0 is sync. In async: updates that rows from a worker's cache may lack
            (`mh.Embedding(cache=...)`). Larger waits less, and trains on older weights.
        backup_workers: sync and ssp: so many slices of slow workers are given to idle workers, too; the first result
            counts. Default: 0.
        aggregate: sync and ssp: how many gradients make one update; the same as `slices`, whatever the number of
            workers.
        damping: async and ssp: divide a gradient by 1 + the number of updates that it has not seen. Default: no.
        place: Patterns of parameters' names, and the number of the server that keeps them. Default: spread by bytes.
        spare: Keep one more server process ready on each host that has servers, to take over at once from one that
            dies. Default: yes where the run has one host.
        push_every: async: push the sum of so many batches' gradients, and take local steps on a copy meanwhile
            (Downpour).
        pull_every: async: fetch fresh weights once in so many batches.
        local_lr: The learning rate of those local steps, which are plain SGD's. Default: the optimizer's.
        warm_steps: async: until this step of the run only one worker computes at a time, before gradients begin to be
            stale. For training that diverges at its beginning. Default: 0.
        durability: What is lost when. "upstream" (the default): nothing when servers die, and what came after the last
            checkpoint when their host or its agent does. "wal": nothing then either; every update is in a log in the
            run directory before workers receive it, and the same command goes on from there. "replica": the same, but a
            copy of the log in another host's memory is enough, or where there is one host, in its kernel's. "snapshot":
            one copy of the optimizer's states instead of two; a server that dies in the middle of an update takes the
            run back to the last checkpoint.
        workers: Workers on each host. Default: one per accelerator; without accelerators, one.
        elastic: (least, most) workers, over all hosts. Default: from 1 to all of them.
        cluster: A `mh.Server`. Default: what the launcher or TF_CONFIG says.
        devices, threads, dtypes, recompute, memory_limit: where, with what and in how much memory workers compute; see
            `mh.Single`.
    """

    servers: int | None = None
    mode: str = "async"
    staleness: int = 3
    backup_workers: int = 0
    aggregate: int | None = None
    damping: bool = False
    place: dict[str, int] | None = None
    spare: bool | None = None
    push_every: int = 1
    pull_every: int = 1
    local_lr: float | None = None
    warm_steps: int = 0
    durability: str = "upstream"
    workers: int | None = None
    elastic: tuple[int, int] | None = None
    cluster: Any = None
    name = "parameter_server"

    def __post_init__(self) -> None:
        one_of("mode", self.mode, MODES, "mh.ParameterServer")
        one_of("durability", self.durability, DURABILITIES, "mh.ParameterServer")
        at_least("servers", self.servers, 1, "mh.ParameterServer")
        at_least("staleness", self.staleness, 0, "mh.ParameterServer")
        at_least("backup_workers", self.backup_workers, 0, "mh.ParameterServer")
        at_least("aggregate", self.aggregate, 1, "mh.ParameterServer")
        if self.aggregate is not None and self.mode == "async":
            what = "aggregate says how many gradients make one update, but async applies each by itself"
            raise _wrong(what, 'mode="sync"', 'mode="ssp"', where="mh.ParameterServer")
        if self.damping and self.mode == "sync":
            what = "damping is for stale gradients, and sync has none"
            raise _wrong(what, "damping=False", 'mode="async"', where="mh.ParameterServer")
        self._check_periods()
        if self.mode == "hybrid":
            self._check_hybrid()

    @property
    def on_servers(self) -> bool:
        return True

    @property
    def leases(self) -> bool:
        return self.mode != "hybrid"

    def keeps_spare(self, num_hosts: int) -> bool:
        return num_hosts == 1 if self.spare is None else self.spare

    @property
    def keeps_log(self) -> bool:
        return self.durability in ("wal", "replica")

    @property
    def takes_local_steps(self) -> bool:
        return self.push_every > 1 or self.pull_every > 1

    def _check_periods(self) -> None:
        at_least("push_every", self.push_every, 1, "mh.ParameterServer")
        at_least("pull_every", self.pull_every, 1, "mh.ParameterServer")
        if self.takes_local_steps and self.mode != "async":
            what = (
                f"push_every is {self.push_every} and pull_every {self.pull_every}, but in {self.mode} every slice is"
            )
            raise _wrong(f"{what} pushed, and needs the newest weights", 'mode="async"', where="mh.ParameterServer")
        at_least("warm_steps", self.warm_steps, 0, "mh.ParameterServer")
        if self.warm_steps and self.mode != "async":
            what = f"warm_steps is {self.warm_steps}, but {self.mode} needs no such beginning: its workers wait"
            raise _wrong(what, "warm_steps=0", 'mode="async"', where="mh.ParameterServer")
        if self.local_lr is not None and not (self.takes_local_steps and self.local_lr >= 0):
            what = f"local_lr is {self.local_lr}, but must be 0 or more, and is for push_every or pull_every above 1"
            raise _wrong(what, "no local_lr=", "push_every=4", where="mh.ParameterServer")

    def _check_hybrid(self) -> None:
        for name in ("staleness", "backup_workers", "aggregate", "damping", "place", "durability"):
            value = getattr(self, name)
            usual = next(field.default for field in msgspec.structs.fields(self) if field.name == name)
            if value != usual:
                what = f"{name} is {value!r}, but in hybrid mode all workers take every step together"
                raise _wrong(what, f"no {name}=", 'mode="sync"', where="mh.ParameterServer")


class LocalSGD(Settings, frozen=True, kw_only=True):
    """Every worker trains weights of its own on its slices, and they are averaged after every `every` steps.

    A round also ends with its epoch, and with `fit`. `outer="nesterov"` is DiLoCo, `outer="elastic"` EASGD. The result
    depends on the number of workers. For links that are too slow to send gradients with every step.

    Args:
        every: H: steps between two averages. Larger sends less, and lets workers drift further apart.
        outer: How the agreed weights move: to the "mean", by a "nesterov" step towards it, or by an "elastic" pull
            (EASGD).
        rule: How workers are put together: "mean", "weighted" by the rows each trained on, "median" or "trimmed" mean;
            the last two for workers that may be wrong.
        trim: The fraction that "trimmed" leaves out at each end; at least one worker, of three or more.
        outer_lr: The learning rate of "nesterov".
        outer_momentum: The momentum of "nesterov".
        pull: Of "elastic": how far the center goes towards the workers' mean; each worker goes pull / workers towards
            it.
        post_local: Until this step of the run, average after every one (post-local SGD). Default: 0.
        fragments: Average the weights in so many parts, which take turns over the `every` steps (streaming DiLoCo).
        overlap: Train on for so many steps while an average is under way.
        own_share: With `overlap`: how much of its own weights a worker keeps when the average arrives, from 0 to below
            1.
        peers: Average with "all", or in "pairs" that are drawn anew each round.
        asynchronous: With "elastic": each worker by itself, after `every` of its own batches. A server keeps the
            center.
        quorum: A round closes with so many workers at least (2), or such a part of them (0.75); a server keeps the
            agreed weights. Needs `deadline_s`. Default: all of them.
        deadline_s: With `quorum`: how many seconds the others are waited for, once the first has finished its round.
        workers: Workers on each host. Default: one per accelerator; without accelerators, one.
        cluster: As `mh.MultiWorker` has it.
        reducer: How weights travel: "exact" (the default), or the change of each in half the bytes ("bf16").
        elastic: (least, most) workers: they may die, come and go. A lost worker takes the others back to the end of the
            last round.
        devices, threads, dtypes, recompute, memory_limit: where, with what and in how much memory workers compute; see
            `mh.Single`.
    """

    every: int = 32
    outer: str = "mean"
    rule: str = "mean"
    trim: float = 0.2
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    pull: float = 0.9
    post_local: int = 0
    fragments: int = 1
    overlap: int = 0
    own_share: float = 0.5
    peers: str = "all"
    asynchronous: bool = False
    quorum: int | float | None = None
    deadline_s: float | None = None
    workers: int | None = None
    cluster: Any = None
    reducer: str | None = None
    elastic: tuple[int, int] | None = None
    name = "local_sgd"

    def __post_init__(self) -> None:
        one_of("outer", self.outer, ("mean", "nesterov", "elastic"), "mh.LocalSGD")
        one_of("rule", self.rule, ("mean", "weighted", "median", "trimmed"), "mh.LocalSGD")
        one_of("peers", self.peers, ("all", "pairs"), "mh.LocalSGD")
        for name, least in (("every", 1), ("fragments", 1), ("overlap", 0), ("post_local", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise _wrong(f"{name} is {value!r}, but must be a whole number from {least} on", f"{name}={least}")
        self._check_numbers()
        self._check_overlap()
        if self.peers == "pairs":
            self._check_pairs()
        if self.leases:
            self._check_leases()

    @property
    def leases(self) -> bool:
        return self.asynchronous or self.quorum is not None or self.deadline_s is not None

    @property
    def on_servers(self) -> bool:
        return self.leases

    def keeps_spare(self, num_hosts: int) -> bool:
        return num_hosts == 1

    @property
    def takes_local_steps(self) -> bool:
        return self.leases

    @property
    def servers(self) -> int | None:
        return 1 if self.on_servers else None

    def _check_leases(self) -> None:
        """What needs all workers at the same time is refused where they are not."""
        for name, usual in (("post_local", 0), ("fragments", 1), ("overlap", 0), ("peers", "all"), ("reducer", None)):
            if getattr(self, name) != usual:
                what = f"{name} is {getattr(self, name)!r}, but workers that do not wait for all push to a server"
                raise _wrong(f"{what}, one by one", f"no {name}=", "neither asynchronous= nor quorum=")
        if self.asynchronous:
            self._check_asynchronous()
        else:
            self._check_quorum()

    def _check_asynchronous(self) -> None:
        if self.quorum is not None or self.deadline_s is not None:
            what = "asynchronous has nobody wait for anybody, but quorum and deadline_s say how long workers wait"
            raise _wrong(what, "no quorum= and deadline_s=", "asynchronous=False")
        if self.outer != "elastic":
            what = f"asynchronous is for elastic averaging, where nobody has to wait, but outer is {self.outer!r}"
            raise _wrong(what, 'outer="elastic"', "asynchronous=False")
        if self.rule != "mean":
            what = f"rule is {self.rule!r}, but one worker at a time moves the center, so there is nothing to combine"
            raise _wrong(what, 'rule="mean"', "asynchronous=False")

    def _check_quorum(self) -> None:
        if self.quorum is None or self.deadline_s is None:
            what = f"quorum is {self.quorum} and deadline_s {self.deadline_s}, but a round needs both to close early"
            raise _wrong(what, "quorum=0.75, deadline_s=10", "neither of them")
        whole = isinstance(self.quorum, int) and not isinstance(self.quorum, bool)
        if not (self.quorum >= 1 if whole else isinstance(self.quorum, float) and 0 < self.quorum < 1):
            what = f"quorum is {self.quorum!r}, but must be a number of workers from 1 on, or a part of them below 1"
            raise _wrong(what, "quorum=2", "quorum=0.75", "no quorum=, to wait for all")
        if not 0 <= self.deadline_s <= LONGEST_DEADLINE_S:
            what = f"deadline_s is {self.deadline_s}, but must be from 0 to {LONGEST_DEADLINE_S:g}"
            raise _wrong(what, "deadline_s=10", "no quorum=, to wait for all")
        if self.outer == "elastic":
            what = "quorum has workers begin each round with the agreed weights, but elastic leaves each its own"
            raise _wrong(what, 'outer="mean"', 'outer="nesterov"', "asynchronous=True, and no quorum=")

    def _check_numbers(self) -> None:
        limits = (
            ("trim", 0 <= self.trim < 0.5, "from 0 to below 0.5", 0.2),
            ("outer_lr", self.outer_lr > 0, "above 0", 0.7),
            ("outer_momentum", 0 <= self.outer_momentum < 1, "from 0 to below 1", 0.9),
            ("pull", 0 < self.pull <= 1, "above 0, and at most 1", 0.9),
            ("own_share", 0 <= self.own_share < 1, "from 0 to below 1", 0.5),
        )
        for name, right, words, usual in limits:
            if not right:
                raise _wrong(f"{name} is {getattr(self, name)}, but must be {words}", f"{name}={usual}")

    def _check_overlap(self) -> None:
        if self.fragments > self.every:
            what = f"fragments is {self.fragments}, but a round has {self.every} steps, and each begins one at most"
            raise _wrong(what, f"fragments={self.every}", f"every={self.fragments}")
        if self.overlap > self.every // self.fragments:
            what = f"overlap is {self.overlap}, but the next of {self.fragments} fragments follows after "
            raise _wrong(f"{what}{self.every // self.fragments} steps", f"overlap={self.every // self.fragments}")
        if self.overlap and self.post_local:
            what = "overlap has averages arrive steps later, but until post_local the next step needs each"
            raise _wrong(what, "post_local=0", "overlap=0")
        if self.overlap and self.outer == "elastic":
            what = "overlap moves workers some steps after the center, but elastic averaging moves both by the same"
            raise _wrong(what, "overlap=0", 'outer="nesterov"')

    def _check_pairs(self) -> None:
        for name, usual in (("outer", "mean"), ("rule", "mean"), ("fragments", 1), ("overlap", 0)):
            if getattr(self, name) != usual:
                what = f"{name} is {getattr(self, name)!r}, but pairs take the mean of two workers' whole weights"
                raise _wrong(what, f"{name}={usual!r}", 'peers="all"')


def _wrong(what: str, *fix: str, where: str = "mh.LocalSGD") -> SpecError:
    return SpecError(f"{what}.", where=where, fix=fix)
