"""A recommender: which items will this user like? Embeddings of users and items by their ids, as large as they are.

    python examples/recommender.py
    mh run -n 2 examples/recommender.py                     # the same figures to rounding
    python examples/recommender.py --data ratings.csv       # with a line of names: user, item, liked (0 or 1), time

The recipe `mh run --recipe recommender` is the long form: wide and deep, with crosses, numbers, files in TOML.

Users and items are any integers: `mh.nn.Embedding` has no table size. A row is tested only if it is among the last
fifth by time, as a recommender is used: the future is predicted from the past. The figure is the AUC: how often a
liked item scores above one that was not. Popularity alone (the item's share of likes in training) is the baseline.

Without --data the ratings are synthetic: hidden tastes of users and items, popularity, and chance.

Strategies that make sense: "mirrored" while every worker can hold the tables. When they grow, change the line to
`strategy=mh.ParameterServer(servers=2, mode="hybrid")`: rows on servers, the rest by all-reduce, the same result.

推荐：这个用户会喜欢哪些物品？按 id 给用户和物品各一个 embedding，有多少 id 就有多少行。

用户和物品可以是任意整数，mh.nn.Embedding 不用给出表的大小。只测试时间上最后五分之一的评分：用过去预测将来，实际的推
荐系统也是这样用的。指标是 AUC：喜欢的物品得分高于不喜欢的有多经常；基线是物品的热门程度。

不写 --data 时评分是合成的。适合的策略：每个 worker 都装得下表时用 mirrored；表变大了，改成 hybrid 的参数服务器：行
在服务器上，其余用 all-reduce，结果相同。

Expected output:

    AUC on the last 8000 ratings: 0.8159
      popularity alone 0.6162, guessing 0.5
      the true tastes 0.8438
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import manyhands as mh


class TwoTowers(nn.Module):
    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        adagrad = mh.optim.rows.Adagrad(lr=0.1)
        self.users = mh.nn.Embedding(dim, name="users", scale=0.3, optimizer=adagrad)
        self.items = mh.nn.Embedding(dim, name="items", scale=0.3, optimizer=adagrad)
        self.user_bias = mh.nn.Embedding(1, name="user bias", init="zeros", optimizer=adagrad)
        self.item_bias = mh.nn.Embedding(1, name="item bias", init="zeros", optimizer=adagrad)
        self.of_user, self.of_item, self.bias = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Parameter(torch.zeros(1))

    def forward(self, pairs: Tensor) -> Tensor:
        user, item = pairs[:, 0], pairs[:, 1]
        fit = (self.of_user(self.users(user)) * self.of_item(self.items(item))).sum(1)
        return fit + self.user_bias(user).squeeze(1) + self.item_bias(item).squeeze(1) + self.bias


def make_ratings(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pairs of user and item in order of time, whether it was liked, and the true logit."""
    draw = np.random.default_rng(0)  # every worker runs this script, and must make the same ratings
    users, items = max(20, rows // 100), max(20, rows // 200)
    user, item = (draw.random(rows) ** 1.5 * users).astype(int), (draw.random(rows) ** 2 * items).astype(int)
    taste, style = draw.normal(0, 1, (users, 2)), draw.normal(0, 1, (items, 2))
    logits = 1.5 * (taste[user] * style[item]).sum(1) + draw.normal(0, 0.7, items)[item]
    liked = draw.random(rows) < 1 / (1 + np.exp(-logits))
    pairs = np.stack([user * 1_000_003 + 17, item * 7_919 + 5], 1)  # any integers
    return torch.from_numpy(pairs), torch.from_numpy(liked).float(), torch.from_numpy(logits)


def read_ratings(path: Path) -> tuple[Tensor, Tensor]:
    table = np.loadtxt(path, delimiter=",", skiprows=1, dtype=np.int64, ndmin=2)
    table = torch.from_numpy(table[table[:, 3].argsort(kind="stable")])
    return table[:, :2], table[:, 2].float()


def auc(scores: Tensor, liked: Tensor) -> float:
    """How often a liked row scores above one that is not; ties count half."""
    _, inverse, counts = scores.double().unique(return_inverse=True, return_counts=True)
    ranks = (counts.cumsum(0) - (counts - 1) / 2)[inverse]
    ones, zeros = int(liked.sum()), int((liked == 0).sum())
    return float((ranks[liked == 1].sum() - ones * (ones + 1) / 2) / (ones * zeros))


def popularity(pairs: Tensor, liked: Tensor, new: Tensor) -> Tensor:
    """The share of likes of each new row's item in training, drawn to the mean where it was seldom seen."""
    items, index = torch.cat([pairs[:, 1], new[:, 1]]).unique(return_inverse=True)
    seen, unseen = index[: len(pairs)], index[len(pairs) :]
    likes, shown = torch.bincount(seen, liked, len(items)), torch.bincount(seen, minlength=len(items))
    return ((likes + 10 * liked.mean()) / (shown + 10))[unseen]


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description="Embeddings of users and items.")
    parser.add_argument("--data", type=Path, help="a .csv file of integers: user, item, liked (0 or 1), time")
    parser.add_argument("--rows", type=int, default=40_000, help="of the synthetic ratings")
    parser.add_argument("--epochs", type=int, default=4)
    options = parser.parse_args(arguments)

    true = None
    if options.data:
        pairs, liked = read_ratings(options.data)
    else:
        pairs, liked, true = make_ratings(options.rows)
    if not torch.isin(liked, torch.tensor([0.0, 1.0])).all():
        parser.error("the third column, liked, must be 0 or 1: decide from which rating on an item is liked")
    past = len(pairs) * 4 // 5

    trainer = mh.Trainer(
        model=TwoTowers,
        loss=lambda model, batch: nn.functional.binary_cross_entropy_with_logits(model(batch[0]), batch[1]),
        optimizer=lambda params: torch.optim.AdamW(params, lr=3e-3),
        strategy="mirrored",
        slices=4,  # fixed, so that any number of workers gives the same model
    )
    trainer.fit((pairs[:past], liked[:past]), epochs=options.epochs, batch_size=256)

    results = {
        "auc": auc(trainer.predict(pairs[past:], batch_size=4096), liked[past:]),
        "popularity": auc(popularity(pairs[:past], liked[:past], pairs[past:]), liked[past:]),
    }
    if trainer.is_chief:
        print(f"AUC on the last {len(pairs) - past} ratings: {results['auc']:.4f}")
        print(f"  popularity alone {results['popularity']:.4f}, guessing 0.5")
        if true is not None:
            print(f"  the true tastes {auc(true[past:], liked[past:]):.4f}")
    trainer.save(trainer.run_dir / "model.safetensors")
    return results


if __name__ == "__main__":
    main()
