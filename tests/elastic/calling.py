"""The training of `training.py` in several calls: what is predicted, saved, loaded and edited between two of `fit`.

`python calling.py '{"steps": 20, "faults": [...], "pause": 25}'`, with the same faults.
"""

from __future__ import annotations

import json
import sys

import torch
from training import ASKED, Watch, arm, data, digest, loss, model

import manyhands as mh

if __name__ == "__main__":
    ASKED.update(json.loads(sys.argv[1]))
    trainer = mh.Trainer(
        model,
        loss,
        lambda params: torch.optim.AdamW(params, lr=2e-3),
        exact=True,
        slices=8,
        seed=3,
        hooks=[Watch()],
    )
    arm()
    trainer.fit(data(), steps=10, batch_size=64)
    predicted = trainer.predict(data())
    trainer.save("weights.safetensors")
    trainer.load("weights.safetensors")
    with trainer.editing() as edited:
        for param in edited.parameters():
            param.mul_(0.5)
    trainer.fit(data(), steps=ASKED["steps"], batch_size=64)
    result = {"digest": digest(trainer.model), "predicted": float(predicted.double().sum())}
    print("RESULT " + json.dumps(result), flush=True)
