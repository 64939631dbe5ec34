"""`mh check` on programs that blow rounding up: they agree, and one that is really wrong is found."""

from __future__ import annotations

from pathlib import Path

import pytest

from manyhands.control.messages.launch_request import WorkerCommand
from manyhands.trials.layout_check import Asked, check

PROGRAM = """
import os, torch, manyhands as mh
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(30, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.body, self.head = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), nn.Linear(16, 30)

    def forward(self, x):
        return self.head(self.body(self.embed(x)))

def loss(model, batch):
    wrong = WRONG if os.environ.get("RANK") == "1" else 1.0
    return wrong * nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

if __name__ == "__main__":
    x = torch.randint(0, 30, (64, 9), generator=torch.Generator().manual_seed(0))
    trainer = mh.Trainer(Model, loss, lambda params: torch.optim.AdamW(params, lr=1e-3), seed=0)
    trainer.fit((x[:, :-1], x[:, 1:]), epochs=2, batch_size=16)
"""


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("wrong", "layout", "deviates"), [(1.0, "tensor 2", False), (1.01, "mirrored 2", True)])
def test_a_transformer_under_adamw_agrees_and_a_worker_that_computes_something_else_is_found(
    tmp_path: Path, wrong: float, layout: str, deviates: bool
) -> None:
    script = tmp_path / "train.py"
    script.write_text(PROGRAM.replace("WRONG", str(wrong)))
    report = check(Asked(command=WorkerCommand("script", str(script), []), most_workers=2, only=(layout,)), print)
    assert not report.findings[0].failed
    assert report.deviates == deviates
