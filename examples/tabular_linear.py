"""A linear model on a table of categories: FTRL with sparse features, whose weights are on parameter servers.

    python examples/tabular_linear.py                       # starts one parameter server beside one worker
    mh run -n 2 examples/tabular_linear.py                  # two workers: the same weights to rounding
    python examples/tabular_linear.py --data parcels.csv    # with a line of names; the last column is 0 or 1

Logistic regression on text columns. Every value of a column has a weight, which is looked up by a hash, so there is
no vocabulary, and a value that appears next month gets a weight when it is first trained. FTRL's L1 sets weights to
exactly 0 where a value says too little. Put numbers into bins first: to this model each number would be a category.

Without --data the table is synthetic: parcels, late or not, with few large and many small routes and senders.

Strategies that make sense: parameter servers, as here, whose mode "sync" has the result of one process;
`strategy="mirrored"` where every worker can hold all weights. For machines of unequal speed change that line to
`strategy=mh.ParameterServer(servers=2, mode="async")`: no worker waits for another, and results depend on timing.

类别表格上的线性模型：FTRL 加稀疏特征，权重放在参数服务器上。

对文本列做逻辑回归。每一列的每个值有一个权重，按哈希查找，所以不需要词表，下个月才出现的值在第一次训练到时得到权重。
值说明不了什么时，FTRL 的 L1 使它的权重恰好为 0。数值要先分箱：对这个模型来说每个数都是一个类别。

不写 --data 时表格是合成的：包裹是否迟到。适合的策略：参数服务器，sync 模式的结果等于单进程；每个 worker 都装得下全
部权重时用 mirrored；机器快慢不一时用 async，互不等待，结果取决于时序。

Expected output:

    log loss on 6045 test rows: 0.5010
      always the training rows' share of 0.274: 0.5810
      the true probabilities: 0.4675
    2504 of 6892 weights are not 0
"""

from __future__ import annotations

import argparse
import csv
import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import manyhands as mh


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # The loss is a mean, so gradients are small, and FTRL's default beta of 1 would hardly change the weights.
        ftrl = mh.optim.rows.FTRL(lr=0.2, l1=0.01, beta=1e-3)
        self.weights = mh.nn.EmbeddingBag(1, name="weights", combiner="sum", init="zeros", optimizer=ftrl)
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, ids: Tensor) -> Tensor:
        return self.weights(ids).squeeze(1) + self.bias


def make_parcels(rows: int) -> tuple[list[str], list[list[str]], Tensor]:
    """Names of columns, rows of text, and the true probability that a parcel is late."""
    draw = np.random.default_rng(0)  # every worker runs this script, and must make the same table
    sizes = {"route": 2000, "sender": 5000, "carrier": 6, "weekday": 7, "weather": 5, "colour": 300}
    strength = {"route": 0.8, "sender": 0.4, "carrier": 0.8, "weekday": 0.4, "weather": 1.0, "colour": 0.0}
    # A few values are frequent and most are rare, as in real tables.
    columns = [(size * draw.random(rows) ** 3).astype(int) for size in sizes.values()]
    logits = -1.5 + sum(
        draw.normal(0, strength[name], sizes[name])[column] for name, column in zip(sizes, columns, strict=True)
    )
    late = 1 / (1 + np.exp(-logits))
    labels = (draw.random(rows) < late).astype(int)
    return (
        [*sizes, "late"],
        [[str(one) for one in row] for row in zip(*columns, labels, strict=True)],
        torch.tensor(late),
    )


def read_table(path: Path) -> tuple[list[str], list[list[str]]]:
    with path.open(newline="") as file:
        names, *rows = filter(None, csv.reader(file))  # not empty lines
    return names, rows


def ids_of(names: list[str], rows: list[list[str]]) -> Tensor:
    """A 64-bit id for each value of each column. Not by hash(), which differs between Python processes."""

    def id_of(text: str) -> int:
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)

    known: dict[str, int] = {}
    values = [[f"{name}={value}" for name, value in zip(names, row, strict=True)][:-1] for row in rows]
    return torch.tensor([[known.get(one) or known.setdefault(one, id_of(one)) for one in row] for row in values])


def log_loss(probabilities: Tensor, truth: Tensor) -> float:
    return float(nn.functional.binary_cross_entropy(probabilities.double(), truth.double()))


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description="Logistic regression on categories, by FTRL on parameter servers.")
    parser.add_argument("--data", type=Path, help="a .csv file; its last column is 0 or 1")
    parser.add_argument("--rows", type=int, default=30_000, help="of the synthetic table")
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args(arguments)

    true = None
    if options.data:
        names, rows = read_table(options.data)
    else:
        names, rows, true = make_parcels(options.rows)
    ids, labels = ids_of(names, rows), torch.tensor([float(row[-1]) for row in rows])
    if not torch.isin(labels, torch.tensor([0.0, 1.0])).all():
        parser.error(f"the last column, {names[-1]}, must be 0 or 1")
    test = torch.rand(len(rows), generator=torch.Generator().manual_seed(1)) < 0.2

    trainer = mh.Trainer(
        model=Linear,
        loss=lambda model, batch: nn.functional.binary_cross_entropy_with_logits(model(batch[0]), batch[1]),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),  # of the bias; weights have FTRL
        strategy=mh.ParameterServer(servers=1, mode="sync"),
        slices=4,  # fixed, so that any number of workers gives the same model
    )
    trainer.fit((ids[~test], labels[~test]), epochs=options.epochs, batch_size=256)

    results = {
        "log loss": log_loss(trainer.predict(ids[test]).sigmoid(), labels[test]),
        "share alone": log_loss(labels[~test].mean().expand(int(test.sum())), labels[test]),
    }
    weights = trainer.model.state_dict()["weights._extra_state"]["rows"]
    results |= {"weights": len(weights), "nonzero": int((weights != 0).sum())}
    if trainer.is_chief:
        print(f"log loss on {int(test.sum())} test rows: {results['log loss']:.4f}")
        print(f"  always the training rows' share of {float(labels[~test].mean()):.3f}: {results['share alone']:.4f}")
        if true is not None:
            print(f"  the true probabilities: {log_loss(true[test], labels[test]):.4f}")
        print(f"{results['nonzero']} of {results['weights']} weights are not 0")
    trainer.save(trainer.run_dir / "model.safetensors")
    return results


if __name__ == "__main__":
    main()
