"""The strategies that a user names to choose how a model is trained: plain settings.

The engines that implement them are in `replicated` and, for `LocalSGD`, in `local_sgd`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from manyhands.errors import SpecError
from manyhands.strategies.settings import LEVELS, StrategySettings, at_least, in_words, one_of

__all__ = ["CentralStorage", "LocalSGD", "Mirrored", "MultiWorker", "ParameterServer", "Sharded", "Single"]

MODES = ("sync", "async", "ssp", "hybrid")
# A worker that receives nothing from the servers for twice as long gives up.
LONGEST_DEADLINE_S = 300.0
DURABILITIES = ("upstream", "wal", "replica", "snapshot")


class Single(StrategySettings, frozen=True, kw_only=True):
    """One worker. The other strategies promise to reach the same result as this one.

    `devices`, `threads`, `dtypes`, `recompute` and `memory_limit` mean the same in every strategy.

    Args:
        devices: One device per worker of this host, such as ("cuda:0", "cuda:1"); a single name applies to all. A
            device that the machine lacks is replaced by the CPU, with a warning. Default: accelerators, else the CPU.
        threads: Threads per worker. Default: cores / workers; with `exact=True`, 1. `mh tune` measures what is fastest.
        dtypes: Layers that compute in a given dtype instead of the run's precision: patterns of layer names, and
            "fp64", "fp32", "bf16" or "fp16". For layers that lose too much in half precision: {"*norm*": "fp32"}.
        recompute: Layers whose activations are not kept but computed again in backward: "blocks", or patterns of names.
            Saves memory, and costs a second forward pass through them; results are bitwise equal. Default: none.
        memory_limit: For each worker, in bytes or as "2GB". The memory that a layout needs is predicted before it
            starts, and a layout that needs more is refused. The interpreter, torch and the program are included.
            Default: none.
    """

    name = "single"


class Mirrored(StrategySettings, frozen=True, kw_only=True):
    """Replicas on one host or on many, one per worker. The default; `mh.MultiWorker` is another name for it.

    Args:
        workers: How many on each host. Default: one per accelerator; without accelerators, one. `mh run -n` overrides
            it.
        cluster: A `mh.Server`, which names the cluster and the task of this process. Default: from the launcher or
            TF_CONFIG.
        on: Hosts that are not this one: `mh.Slurm(hosts=4)`, `mh.Ssh(hosts="a,b")` or `mh.Kubernetes(image="...")`.
            `python train.py` then places the run there and follows it. Default: this host.
        reducer: How gradients are sent: "exact" (the default), "bf16" in half the bytes, or "int8" in a quarter. The
            last two round, so that results depend on the number of workers; for links that are slower than the
            computation. Or a function of one parameter's gradients, a list with one for each slice, in place of their
            sum; so may the optimizer have a method `reduce_grad` of all parameters' lists.
        elastic: (least, most) workers over all hosts: workers and hosts may fail, join and leave while the others
            train. Default: when a worker is lost, the run restarts from its last checkpoint.
        devices, threads, dtypes, recompute, memory_limit: devices, threads, precision and memory of the workers; see
            `mh.Single`.
    """

    workers: int | None = None
    cluster: Any = None
    on: Any = None
    reducer: Any = None
    elastic: tuple[int, int] | None = None
    name = "mirrored"

    def __post_init__(self) -> None:
        if self.on is not None and not hasattr(self.on, "placer"):
            raise _wrong(f"on is {self.on!r}, which places no agents", "on=mh.Slurm(hosts=4)", where="mh.Mirrored")
        if not (self.reducer is None or isinstance(self.reducer, str) or callable(self.reducer)):
            raise _wrong(
                f"reducer is {self.reducer!r}, neither a name nor a function", 'reducer="bf16"', where="mh.Mirrored"
            )


MultiWorker = Mirrored
"""Replicas are the same strategy on one host and on many."""


def _refuse_reducer(reducer: Any, where: str) -> None:
    """`SpecError` for a reducer where the workers divide the sum of the gradients."""
    if reducer is None or reducer == "exact":
        return
    if not callable(reducer):
        raise _wrong(
            f"reducer is {reducer!r}, but gradients are summed exactly here",
            "no reducer=",
            'mh.Mirrored(reducer="bf16")',
            where=where,
        )
    raise _wrong(
        "reducer is a function of every slice's gradients, but the workers divide their sum: each adds up a part, and "
        "none sees the gradients of all slices",
        "mh.Mirrored(reducer=...)",
        "no reducer=",
        where=where,
    )


class CentralStorage(StrategySettings, frozen=True, kw_only=True):
    """One copy of the weights in the host's memory, updated once per step; all workers of the host compute with it.

    Args:
        workers: How many. Default: one per accelerator; without accelerators, one.
        devices, threads, dtypes, recompute, memory_limit: devices, threads, precision and memory of the workers; see
            `mh.Single`.
        reducer: Only None and "exact": the workers add up gradients in the memory that they share, where no worker sees
            those of each slice. A function is for `mh.Mirrored`.
    """

    workers: int | None = None
    reducer: Any = None
    name = "central_storage"

    def __post_init__(self) -> None:
        _refuse_reducer(self.reducer, "mh.CentralStorage")


class _Level(StrategySettings, frozen=True):
    level: str = "parameters"


class Sharded(_Level, frozen=True, kw_only=True):
    """Replicas whose memory is sharded over the workers. (ZeRO 1, 2 and 3; FSDP.)

    Workers that share memory have one copy of the weights, with optimizer state and gradient sums sharded, at both of
    the lower levels. At "parameters", and where no memory is shared, each worker has a shard of everything, and
    gathers the rest while it computes: block by block, or at the lower levels once per step.

    Args:
        level: What is sharded over the workers: "optimizer" state, "gradients" too, or "parameters" as well (the
            default). A higher level needs less memory and more communication.
        offload: Where shards are stored while not in use: None, on the device, or "host", in the host's memory. For
            accelerators that are short of memory.
        recompute: Layers whose activations are not kept but computed again in backward: "blocks", or patterns of names.
            Costs about a third more computation, for activations that do not fit. Default: none.
        workers: Workers on each host. Default: one per accelerator; without accelerators, one.
        cluster: As in `mh.Mirrored`.
        devices, threads, dtypes, memory_limit: devices, threads, precision and memory of the workers; see
            `mh.Single`.
        reducer: As in `mh.CentralStorage`.
    """

    offload: str | None = None
    workers: int | None = None
    cluster: Any = None
    reducer: Any = None
    name = "sharded"

    def __post_init__(self) -> None:
        _refuse_reducer(self.reducer, "mh.Sharded")
        one_of("level", self.level, LEVELS, "mh.Sharded")
        if self.offload not in (None, "host"):
            raise _wrong(f"offload is {self.offload!r}", 'offload="host"', "offload=None", where="mh.Sharded")

    @property
    def divided(self) -> str:
        """What is sharded, in words, for the run's first line."""
        return in_words(self.level)


class ParameterServer(StrategySettings, frozen=True, kw_only=True):
    """Weights on server processes, to which workers push gradients and from which they pull weights.

    Args:
        servers: How many server processes. Default: 2.
        mode: "async" (the default): each worker takes a batch at a time, and its gradient is applied when it arrives.
            "sync": the slices of a batch are distributed and applied together, as in `mh.Mirrored`. "ssp": the same,
            but a slice of step t may be computed with weights that lack the last `staleness` steps before it. "hybrid":
            dense weights as in `mh.Mirrored`, and only the rows of `mh.nn.Embedding` and `mh.nn.EmbeddingBag` on
            servers.
        staleness: ssp: in steps; 0 is sync. async: how many updates a row from a worker's cache may lack
            (`mh.nn.Embedding(cache=...)`). A larger value waits less, and trains on older weights.
        backup_workers: sync and ssp: so many slices of slow workers are also given to idle workers; the first result
            counts. Default: 0.
        aggregate: sync and ssp: how many gradients make one update; the same as `slices`, for any number of workers.
        damping: async and ssp: divide a gradient by 1 + the number of updates that it has not seen. Default: no.
        place: Patterns of parameter names, and the number of the server that stores them. Default: balanced by bytes.
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
            run directory before workers receive it, and the same command continues from there. "replica": the same, but
            a copy of the log in another host's memory is enough, or with one host, in its kernel's. "snapshot": one
            copy of the optimizer state instead of two; when a server dies in the middle of an update, the run restarts
            from the last checkpoint.
        workers: Workers on each host. Default: one per accelerator; without accelerators, one.
        elastic: (least, most) workers, over all hosts. Default: from 1 to all of them.
        cluster: A `mh.Server`. Default: from the launcher or TF_CONFIG.
        devices, threads, dtypes, recompute, memory_limit: devices, threads, precision and memory of the workers; see
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
            what = "aggregate says how many gradients make one update, but async applies every gradient separately"
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

    @property
    def lease_mode(self) -> str:
        return f'mode="{self.mode}"' + (f", staleness={self.staleness}" if self.mode == "ssp" else "")

    @property
    def without_leases(self) -> str:
        return 'mode="hybrid"'

    @property
    def waits_for_all(self) -> bool:
        return self.mode in ("sync", "hybrid") or (self.mode == "ssp" and self.staleness == 0)

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
            what = f"warm_steps is {self.warm_steps}, but {self.mode} needs no warm-up: its workers wait"
            raise _wrong(what, "warm_steps=0", 'mode="async"', where="mh.ParameterServer")
        if self.local_lr is not None and not (self.takes_local_steps and self.local_lr >= 0):
            what = f"local_lr is {self.local_lr}, but must be 0 or more, and is for push_every or pull_every above 1"
            raise _wrong(what, "no local_lr=", "push_every=4", where="mh.ParameterServer")

    def _check_hybrid(self) -> None:
        for name in ("staleness", "backup_workers", "aggregate", "damping", "place", "durability"):
            value = getattr(self, name)
            usual = next(field.default for field in msgspec.structs.fields(self) if field.name == name)
            if value != usual:
                what = f"{name} is {value!r}, but in hybrid mode all workers run every step together"
                raise _wrong(what, f"no {name}=", 'mode="sync"', where="mh.ParameterServer")


class LocalSGD(StrategySettings, frozen=True, kw_only=True):
    """Every worker trains its own copy of the weights on its slices; the copies are averaged every `every` steps.

    An averaging round also ends with its epoch, and with `fit`. `outer="nesterov"` is DiLoCo, `outer="elastic"` EASGD.
    The result depends on the number of workers. For links that are too slow to send gradients with every step.

    Args:
        every: H: steps between two averages. A larger value sends less, and lets the workers' weights diverge further.
        outer: How the agreed weights move: to the "mean", by a "nesterov" step towards it, or by an "elastic" pull
            (EASGD).
        rule: How the workers' weights are combined: "mean", "weighted" by the rows each trained on, "median" or
            "trimmed" mean; the last two tolerate workers with wrong values.
        trim: The fraction that "trimmed" leaves out at each end; at least one worker, of three or more.
        outer_lr: The learning rate of "nesterov".
        outer_momentum: The momentum of "nesterov".
        pull: For "elastic": how far the center moves towards the workers' mean; each worker moves pull / workers
            towards the center.
        post_local: Until this step of the run, average after every step (post-local SGD). Default: 0.
        fragments: Average the weights in so many fragments, one after another over the `every` steps (streaming
            DiLoCo).
        overlap: Keep training for so many steps while an average is being computed.
        own_share: With `overlap`: how much of its own weights a worker keeps when the average arrives, from 0 to below
            1.
        peers: Average with "all", or in "pairs" that are drawn anew each round.
        asynchronous: With "elastic": each worker averages with the center after `every` of its own batches, without
            waiting for other workers. A server stores the center.
        quorum: A round closes with at least so many workers (2), or this fraction of them (0.75); a server stores the
            agreed weights. Needs `deadline_s`. Default: all of them.
        deadline_s: With `quorum`: how many seconds to wait for the others, once the first has finished its round.
        workers: Workers on each host. Default: one per accelerator; without accelerators, one.
        cluster: As in `mh.Mirrored`.
        reducer: How weights are sent: "exact" (the default), or their changes in half the bytes ("bf16").
        elastic: (least, most) workers: they may fail, join and leave. When a worker is lost, the others return to the
            end of the last averaging round.
        devices, threads, dtypes, recompute, memory_limit: devices, threads, precision and memory of the workers; see
            `mh.Single`.
    """

    every: int = 32
    outer: str = "mean"
    rule: str = "mean"
    trim: float = 0.2
    outer_lr: float = 0.7  # this and the momentum are the best values according to the DiLoCo paper
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
        if not isinstance(self.reducer, str | None):
            raise _wrong(
                "reducer is a function of gradients, but workers send weights, once in a round",
                'rule="median"',
                "mh.Mirrored(reducer=...)",
            )
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
    def lease_mode(self) -> str:
        return "asynchronous=True" if self.asynchronous else f"quorum={self.quorum}"

    @property
    def without_leases(self) -> str:
        return "neither asynchronous= nor quorum="

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
        """Refuse the settings that need all workers at the same time."""
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
            what = "with asynchronous no worker waits for another, but quorum and deadline_s say how long workers wait"
            raise _wrong(what, "no quorum= and deadline_s=", "asynchronous=False")
        if self.outer != "elastic":
            what = f"asynchronous is for elastic averaging, where no worker has to wait, but outer is {self.outer!r}"
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
            what = "with quorum, workers begin each round with the agreed weights, but elastic lets each keep its own"
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
            what = "with overlap, averages arrive some steps later, but until post_local the next step needs each one"
            raise _wrong(what, "post_local=0", "overlap=0")
        if self.overlap and self.outer == "elastic":
            what = (
                "overlap moves workers some steps after the center, but elastic averaging moves both by the same amount"
            )
            raise _wrong(what, "overlap=0", 'outer="nesterov"')

    def _check_pairs(self) -> None:
        for name, usual in (("outer", "mean"), ("rule", "mean"), ("fragments", 1), ("overlap", 0)):
            if getattr(self, name) != usual:
                what = f"{name} is {getattr(self, name)!r}, but pairs take the mean of two workers' whole weights"
                raise _wrong(what, f"{name}={usual!r}", 'peers="all"')


def _wrong(what: str, *fix: str, where: str = "mh.LocalSGD") -> SpecError:
    return SpecError(f"{what}.", where=where, fix=fix)
