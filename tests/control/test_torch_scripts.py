"""Gloo over the run's own store, and scripts that know nothing of manyhands."""

from __future__ import annotations

import textwrap

import pytest

pytestmark = pytest.mark.slow


def test_gloo_sums_through_the_control_store_and_no_tcp_store_listens(launcher):
    run = launcher(
        """
        import torch, torch.distributed as dist
        from manyhands.comm.store import ControlStore
        session = join()
        store = ControlStore(session, prefix="gloo/")
        dist.init_process_group("gloo", store=store, rank=RANK, world_size=2)
        value = torch.tensor([float(RANK + 1)])
        dist.all_reduce(value)
        group = dist.new_group([0, 1])
        dist.all_reduce(value, group=group)
        print(value.item(), flush=True)
        import psutil
        kin = [psutil.Process(os.getppid()), *psutil.Process(os.getppid()).children(recursive=True)]
        listening = {c.laddr.ip for p in kin for c in p.net_connections("tcp") if c.status == "LISTEN"}
        stores = [p for p in kin if "manyhands.control.processes.torch_store" in p.cmdline()]
        print(sorted(listening), len(stores), flush=True)
        dist.barrier()
        dist.destroy_process_group()
        session.close()
    """,
        workers=2,
    )
    assert run.wait() == 0, run.err
    assert run.out == "6.0\n['127.0.0.1'] 0\n"


@pytest.mark.long
def test_a_script_written_for_torchrun_runs_unmodified_and_again_after_a_crash(launcher):
    (launcher.folder / "ddp.py").write_text(
        textwrap.dedent("""
        import os, signal, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        value = torch.ones(1) * (dist.get_rank() + 1)
        dist.all_reduce(value)
        attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        if attempt == 0 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        print(attempt, value.item(), os.environ["LOCAL_WORLD_SIZE"], flush=True)
        dist.barrier()
        dist.destroy_process_group()
    """)
    )
    run = launcher(command={"kind": "script", "target": "ddp.py", "args": []}, workers=2)
    assert run.wait() == 0, run.err
    assert run.out.splitlines()[-1] == "1 3.0 2"
