"""The seats that a plan gives out: which process is who, before its crew adds what all of them share. Pure."""

from __future__ import annotations

from manyhands.control.membership.generations import group_for
from manyhands.control.messages.agent_messages import Plan, PlannedWorker
from manyhands.spec.worker_identity import Seat

__all__ = ["elastic_seat", "server_seat", "static_seat"]


def static_seat(plan: Plan, local_rank: int) -> Seat:
    return Seat(
        agent="",
        rank=plan.first_rank + local_rank,
        world_size=plan.world_size,
        local_rank=local_rank,
        local_world_size=len(plan.incarnations),
        host=plan.host,
        num_hosts=plan.num_hosts,
        generation=plan.generation,
        incarnation=plan.incarnations[local_rank],
        attempt=plan.attempt,
    )


def elastic_seat(plan: Plan, planned: PlannedWorker) -> Seat:
    group = group_for(plan, planned.incarnation)
    here = sorted(worker.slot for worker in plan.workers)
    joining = planned.joining or group.rank < 0
    return Seat(
        agent="",
        rank=planned.slot if joining else group.rank,
        world_size=group.world_size,
        local_rank=here.index(planned.slot) if joining else group.local_rank,
        local_world_size=len(here) if joining else group.local_world_size,
        host=plan.host,
        num_hosts=plan.num_hosts,
        generation="" if joining else plan.generation,
        incarnation=planned.incarnation,
        attempt=plan.attempt,
        slot=planned.slot,
        joining=joining,
    )


def server_seat(plan: Plan, number: int, incarnation: int) -> Seat:
    return Seat(
        agent="",
        rank=-1,
        world_size=plan.world_size,
        local_rank=0,
        local_world_size=max(1, len(plan.workers)),
        host=plan.host,
        num_hosts=plan.num_hosts,
        generation="",
        incarnation=incarnation,
        attempt=plan.attempt,
        role="server",
        server=number,
    )
