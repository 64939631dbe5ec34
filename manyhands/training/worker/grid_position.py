"""Where a worker stands among the others: its rank, its place in the grid, and how many replicas there are."""

from __future__ import annotations

from manyhands.comm.mesh import Formation, Grid, by_slots, in_order
from manyhands.control.session.session import Session
from manyhands.launcher.solo_run import Solo
from manyhands.spec.worker_identity import Group
from manyhands.strategies.model_parallel import DIVIDED, Mesh, grid_of, replica_of
from manyhands.training.worker.strategy_lookup import StrategyChoice

__all__ = ["InGrid"]


class InGrid:
    def __init__(self, session: Session | Solo, strategy: StrategyChoice) -> None:
        self.session, self.strategy = session, strategy
        seat = session.seat
        self.is_elastic = seat.most_workers > 0
        self.most_workers = seat.most_workers or seat.world_size
        """How many there may ever be."""
        self._formation: Formation | None = None

    rank = property(lambda self: self.session.group.rank)
    world_size = property(lambda self: self.session.group.world_size)
    is_chief = property(lambda self: self.session.group.rank == 0)

    @property
    def group(self) -> Group:
        return self.session.group

    @property
    def formation(self) -> Formation | None:
        """Who stands where; None: too many are missing to train. A slot of an elastic run stands for a place.

        Where the strategy does not divide the model, each worker is a replica of it.
        """
        if self._formation is None:
            if self.is_elastic and self.is_divided:
                enough = self.world_size >= self.session.seat.least_workers
                self._formation = by_slots(self.one_replica, self.group.slots) if enough else None
            else:
                self._formation = in_order(grid_of(self.strategy, self.world_size))
        return self._formation

    @property
    def one_replica(self) -> Grid:
        """The workers of one, of a model that is divided; in an elastic run, as it began."""
        return replica_of(self.strategy, self.session.seat.world_size)

    @property
    def grid(self) -> Grid:
        """How the workers stand; of a waiting one, how they would if all came."""
        if self.is_waiting and self.is_divided:
            return self.one_replica._replace(data=self.most_replicas)
        return self._stand().grid

    @property
    def spot(self) -> Grid:
        """Where this worker stands in the grid."""
        return self._stand().places[int(self.rank)]

    def _stand(self) -> Formation:
        assert self.formation is not None, "workers are missing, and nobody can train"
        return self.formation

    @property
    def is_divided(self) -> bool:
        """Whether a replica of the model takes several workers."""
        return isinstance(self.strategy, DIVIDED)

    @property
    def replica(self) -> int:
        """Which replica of the model this worker is, or belongs to; a waiting one has none yet."""
        return self.spot.data if self.is_divided and not self.is_waiting else int(self.rank)

    def rank_in(self, replica: int) -> int:
        """The worker of another replica that has the same part of the model as this one."""
        return self._stand().line(int(self.rank), "data")[replica]

    @property
    def num_replicas(self) -> int:
        return self.grid.data if self.is_divided else int(self.world_size)

    @property
    def most_replicas(self) -> int:
        """How many workers, or groups of workers, may ever share a batch."""
        if not self.is_divided:
            return self.most_workers
        return self.most_workers // self.one_replica.size if isinstance(self.strategy, Mesh) else 1

    @property
    def is_waiting(self) -> bool:
        """Started into a running run, and not admitted yet."""
        return self.session.group.rank < 0
