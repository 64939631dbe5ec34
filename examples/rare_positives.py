"""Risk: one loan in fifty defaults. Class weights, and figures that do not flatter where positives are rare.

    python examples/rare_positives.py
    mh run -n 2 examples/rare_positives.py                  # the same figures to rounding
    python examples/rare_positives.py --data loans.csv      # numbers with a line of names; the last column is 0 or 1

Accuracy says nothing here: "nobody defaults" is right in 98 % of cases. What counts: average precision (guessing has
the share of positives), and how many of the defaults are found if half of the alarms have to be right. The threshold
for that is chosen on validation rows, and judged on test rows.

Without --data the table is synthetic: twelve measurements of a borrower, a true risk of default, and chance.

A weighted mean is no mean over rows, so the loss returns (sum, weight): then it is that of the whole batch, however
the positives are distributed over slices and workers. `mh.order.Weighted` would draw positives more often instead.

Strategies that make sense: "mirrored". Where workers come and go or differ in speed, change the line to
`strategy=mh.ParameterServer(servers=1, mode="sync")`. For columns of categories see tabular_linear.py.

风控：五十笔贷款里有一笔违约。用类别权重，报告的指标在正例稀少时也不虚高。

这里准确率毫无意义：“谁都不违约”就有 98 % 正确。要看的是平均精度（瞎猜等于正例的比例），以及要求一半的警报正确时能找
出多少违约。阈值在验证行上选定，在测试行上评判。

不写 --data 时表格是合成的。加权平均不是按行的平均，所以损失返回（总和，权重）：正例怎样分到切片和 worker 上都没有区
别。适合的策略：mirrored；worker 来来去去或快慢不一时，用同步的参数服务器。

Expected output:

    6000 test rows, 118 of them positive:
      average precision 0.3733; guessing 0.0197
      75 alarms: precision 0.4533, recall 0.2881
      accuracy of 'never': 0.9803, with recall 0
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import manyhands as mh


def make_loans(rows: int) -> Tensor:
    draw = torch.Generator().manual_seed(0)  # every worker runs this script, and must make the same table
    x = torch.randn(rows, 12, generator=draw)
    debt, income, late, age = x[:, 0], x[:, 1], x[:, 2].clamp(min=0), x[:, 3]
    risk = -7.3 + 1.4 * debt - 1.2 * income + 1.8 * late * (debt > 0) + 0.5 * age**2 + 0.6 * x[:, 4] * x[:, 5]
    defaulted = torch.rand(rows, generator=draw) < risk.sigmoid()
    return torch.cat([x, defaulted[:, None].float()], 1)


def read_loans(path: Path) -> Tensor:
    return torch.from_numpy(np.loadtxt(path, delimiter=",", skiprows=1, dtype=np.float32, ndmin=2))


def precision_and_recall(scores: Tensor, truth: Tensor) -> tuple[Tensor, Tensor]:
    """For an alarm at the highest score only, at the two highest, and so on."""
    found = truth[scores.argsort(descending=True, stable=True)].double().cumsum(0)
    return found / torch.arange(1, len(found) + 1), found / found[-1]


def average_precision(scores: Tensor, truth: Tensor) -> float:
    precision, recall = precision_and_recall(scores, truth)
    return float((precision * recall.diff(prepend=torch.zeros(1).double())).sum())


def threshold_for(scores: Tensor, truth: Tensor, precision: float) -> float:
    """The lowest score from which on alarms are right that often."""
    reached = (precision_and_recall(scores, truth)[0] >= precision).nonzero()
    return float(scores.sort(descending=True).values[int(reached[-1])]) if len(reached) else float(scores.max())


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description="Rare positives: class weights and honest figures.")
    parser.add_argument("--data", type=Path, help="a .csv file; its last column is 1 for a positive, else 0")
    parser.add_argument("--rows", type=int, default=30_000, help="of the synthetic table")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--weight", type=float, default=10.0, help="of a positive, where a negative has 1")
    options = parser.parse_args(arguments)

    table = read_loans(options.data) if options.data else make_loans(options.rows)
    if not (table.isfinite().all() and torch.isin(table[:, -1], torch.tensor([0.0, 1.0])).all()):
        parser.error("the table needs numbers without gaps, and a last column of 0 and 1")
    table = table[torch.randperm(len(table), generator=torch.Generator().manual_seed(1))]
    tenth = len(table) // 10
    mean, deviation = table[4 * tenth :, :-1].mean(0), table[4 * tenth :, :-1].std(0).clamp(min=1e-6)
    x, y = (table[:, :-1] - mean) / deviation, table[:, -1]
    test, validation, training = ((x[s], y[s]) for s in _split(tenth))

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        weights = torch.where(batch[1] == 1, options.weight, 1.0)
        losses = nn.functional.binary_cross_entropy_with_logits(model(batch[0]).squeeze(1), batch[1], reduction="none")
        return (losses * weights).sum(), weights.sum()

    trainer = mh.Trainer(
        model=lambda: nn.Sequential(
            nn.Linear(x.shape[1], 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1)
        ),
        loss=loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=3e-3),
        strategy="mirrored",
        slices=4,  # fixed, so that any number of workers gives the same model
    )
    trainer.fit(training, epochs=options.epochs, batch_size=256, validation=validation)

    threshold = threshold_for(trainer.predict(validation[0]).squeeze(1), validation[1], precision=0.5)
    scores, truth = trainer.predict(test[0]).squeeze(1), test[1]
    alarms = scores >= threshold
    results = {
        "average precision": average_precision(scores, truth),
        "share of positives": float(truth.mean()),
        "precision": float(truth[alarms].mean()),
        "recall": float(alarms[truth == 1].float().mean()),
    }
    if trainer.is_chief:
        print(f"{len(truth)} test rows, {int(truth.sum())} of them positive:")
        print(f"  average precision {results['average precision']:.4f}; guessing {results['share of positives']:.4f}")
        print(f"  {int(alarms.sum())} alarms: precision {results['precision']:.4f}, recall {results['recall']:.4f}")
        print(f"  accuracy of 'never': {1 - results['share of positives']:.4f}, with recall 0")
    trainer.save(trainer.run_dir / "model.safetensors")
    return results


def _split(tenth: int) -> tuple[slice, slice, slice]:
    """Test, validation, training."""
    return slice(2 * tenth), slice(2 * tenth, 4 * tenth), slice(4 * tenth, None)


if __name__ == "__main__":
    main()
