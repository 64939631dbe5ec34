"""The training of `training.py` in a user loop, which calls a collective after every step.

`python own_loop.py '{"steps": 30, "faults": [...]}'`, with the same faults; with few "slices" some workers have none.
With "before" it asks them before the first step, too.
"""

from __future__ import annotations

import json
import math
import sys

import torch
import training
from training import ASKED, Watch, arm, data, digest, loss, model

import manyhands as mh

if __name__ == "__main__":
    ASKED.update(json.loads(sys.argv[1]))
    torch.manual_seed(0)
    hands, trained = mh.join(exact=True, slices=ASKED.get("slices", 8), seed=3), model()
    trained, optimizer = hands.setup(trained, torch.optim.AdamW(trained.parameters(), lr=2e-3))
    arm()
    watch = Watch()
    if ASKED.get("before"):
        hands.reduce(torch.ones(1))
    for batch in hands.batches(data(), batch_size=64, steps=ASKED["steps"]):
        if hands.steps_done + 1 != training.STEP:
            watch.before_step(hands, hands.steps_done + 1)
        value = loss(trained, batch)
        hands.backward(value)
        hands.step()
        if hands.stepped:
            assert math.isfinite(hands.mean(value))
            if "slices" not in ASKED:  # else some workers do not come by here
                assert float(hands.reduce(torch.ones(1))) == hands.world_size
    result = {"reached": hands.steps_done, "digest": digest(trained), "evaluated": hands.evaluate(data(), loss)["loss"]}
    if hands.is_chief:
        print("RESULT " + json.dumps(result), flush=True)
