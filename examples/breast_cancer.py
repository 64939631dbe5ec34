"""Medical data: malignant or benign, by 30 measurements of cell nuclei, with figures that a physician would ask for.

    pip install ".[examples]"                               # scikit-learn, which ships the data; from this repository
    python examples/breast_cancer.py
    mh run -n 2 examples/breast_cancer.py                   # the same bits, thanks to exact=True
    python examples/breast_cancer.py --data patients.csv    # numbers with a line of names; the last column is 0 or 1

With 569 patients one small test set would say little, so this is a cross-validation: five trainings in one script,
each tested on the fifth of the patients that it has not seen. A killed run resumes in the training that it was in.

The data is real: Breast Cancer Wisconsin (Diagnostic), by Wolberg, Mangasarian, Street and Street, 1995, from the UCI
repository under CC BY 4.0, as scikit-learn ships it. It shows how to train and to test; it is no medical device.

Strategies that make sense: "mirrored". The data is small, so a second worker brings little:
`strategy="single"` is as good.

医疗：用细胞核的 30 项测量判断良性或恶性，报告医生关心的指标。

只有 569 名患者，一个小测试集说明不了什么，所以做交叉验证：一个脚本里训练五次，每次用没见过的五分之一患者测试。被杀
掉的训练会在它所在的那一次里续训。第一条命令要装 scikit-learn，数据在它里面：在代码目录里执行 pip install 那一行，因
为 manyhands 还没有上传到包索引。数据是真实的，但这个程序不是医疗器械。

适合的策略：mirrored；数据少，第二个 worker 帮助不大，用 single 也一样好。exact=True 使一个和两个 worker 的结果逐位
相同。

Expected output:

    569 patients, each judged by a network that was trained without them:
      accuracy 0.9824; always saying the commoner 0.6274
      sensitivity 0.9717: 6 of 212 malignant cases missed
      specificity 0.9888: 4 false alarms
      area under the curve 0.9939; guessing has 0.5
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import manyhands as mh

FOLDS = 5


def read_patients(path: Path | None) -> tuple[Tensor, Tensor]:
    """Measurements, and 1 for malignant."""
    if path is not None:
        table = torch.from_numpy(np.loadtxt(path, delimiter=",", skiprows=1, dtype=np.float32, ndmin=2))
        return table[:, :-1], table[:, -1:]
    from sklearn.datasets import load_breast_cancer

    data = load_breast_cancer()  # its target is 1 for benign
    return torch.tensor(data.data, dtype=torch.float32), 1 - torch.tensor(data.target, dtype=torch.float32)[:, None]


def folds(malignant: Tensor) -> Tensor:
    """The fold of each patient: random, but with the same share of malignant ones in each."""
    fold = torch.empty(len(malignant), dtype=torch.long)
    for kind in (0, 1):
        rows = (malignant[:, 0] == kind).nonzero()[:, 0]
        rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(kind))]
        fold[rows] = torch.arange(len(rows)) % FOLDS
    return fold


def area_under_curve(scores: Tensor, malignant: Tensor) -> float:
    """How often a malignant case has a higher score than a benign one."""
    pairs = scores[malignant == 1][:, None] - scores[malignant == 0][None]
    return float((pairs > 0).double().mean() + 0.5 * (pairs == 0).double().mean())


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description="Cross-validation on a table of patients.")
    parser.add_argument("--data", type=Path, help="a .csv file; its last column is 1 for malignant, else 0")
    parser.add_argument("--epochs", type=int, default=20)
    options = parser.parse_args(arguments)

    x, malignant = read_patients(options.data)
    if not (x.isfinite().all() and torch.isin(malignant, torch.tensor([0.0, 1.0])).all()):
        parser.error("the table needs numbers without gaps, and a last column of 0 and 1")
    fold, scores = folds(malignant), torch.empty(len(x))
    for number in range(FOLDS):
        test = fold == number
        mean, deviation = x[~test].mean(0), x[~test].std(0).clamp(min=1e-6)  # by the patients that train
        scaled = (x - mean) / deviation
        trainer = mh.Trainer(
            model=lambda: nn.Sequential(nn.Linear(x.shape[1], 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1)),
            loss=nn.BCEWithLogitsLoss(),
            optimizer=lambda params: torch.optim.AdamW(params, lr=5e-3, weight_decay=1e-2),
            strategy="mirrored",
            slices=2,  # fixed, with exact: 1 or 2 workers end with the same bits
            exact=True,
        )
        trainer.fit((scaled[~test], malignant[~test]), epochs=options.epochs, batch_size=32)
        scores[test] = trainer.predict(scaled[test]).squeeze(1)

    truth = malignant[:, 0]
    found = (scores > 0).float()
    benign_share = 1 - float(truth.mean())
    results = {
        "accuracy": float((found == truth).float().mean()),
        "always the commoner": max(benign_share, 1 - benign_share),
        "sensitivity": float(found[truth == 1].mean()),
        "specificity": 1 - float(found[truth == 0].mean()),
        "auc": area_under_curve(scores, truth),
    }
    if trainer.is_chief:
        missed, alarms = int((truth - found == 1).sum()), int((found - truth == 1).sum())
        print(f"{len(x)} patients, each judged by a network that was trained without them:")
        print(f"  accuracy {results['accuracy']:.4f}; always saying the commoner {results['always the commoner']:.4f}")
        print(f"  sensitivity {results['sensitivity']:.4f}: {missed} of {int(truth.sum())} malignant cases missed")
        print(f"  specificity {results['specificity']:.4f}: {alarms} false alarms")
        print(f"  area under the curve {results['auc']:.4f}; guessing has 0.5")
    return results


if __name__ == "__main__":
    main()
