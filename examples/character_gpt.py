"""A character-level GPT in a loop of one's own: nanoGPT's training loop, with mh.join.

    python examples/character_gpt.py
    mh run -n 2 examples/character_gpt.py                   # the same losses to rounding
    python examples/character_gpt.py --data input.txt --layers 4 --width 128 --steps 2000

Five lines of the loop are manyhands': `join`, `setup`, `resume`, `batches` and `backward`/`step`. The rest is
nanoGPT's: a learning rate with warm-up and cosine decay, clipping, held-out loss and a sample at the end.
`batches` yields one slice of the global batch at a time, so gradient accumulation is a number, `slices=`, and
not a loop.

Without --data the text is the documentation of Python's own language, which every Python has: pydoc_data.topics. The
last tenth is held out. The figure is nats per character; the baselines are the frequencies of characters, and of
pairs.

Strategies that make sense: "mirrored". For a model whose optimizer state fills the memory change the line to
`strategy="sharded"`; for a slow network to `strategy=mh.LocalSGD(every=32, outer="nesterov")`, whose result then
depends on the number of workers.

逐字符的 GPT，自己写训练循环：nanoGPT 的循环加上 mh.join。

循环里只有五行是 manyhands 的：join、setup、resume、batches、backward/step。其余照 nanoGPT：学习率预热加余弦下降、梯
度裁剪、留出文本上的损失、最后生成一段。batches 每次给出全局批次的一个切片，所以梯度累积只是 slices= 这个数，不必再
写一层循环。

不写 --data 时，文本是 Python 自带的语言文档，最后十分之一留出。指标是每个字符的 nat 数，对比单字符频率和双字符频率。
适合的策略：mirrored；优化器状态占满内存时用 sharded，网络慢时用 LocalSGD，后者的结果取决于 worker 数。

Expected output:

    2.0015 nats per character of held-out text
      the frequencies of characters 3.5095, of pairs 2.4305
    sinocss, 'narget abucce Pyasss NEr___" chempy, in by *he ppoirsed isonminall dise stougnm ostshinf

On Shakespeare's plays (1.1 MB, as nanoGPT uses them), `--layers 3 --width 96 --steps 1500 --lr 2e-3` reached 1.8270
nats per character; the frequencies of characters have 3.3473, those of pairs 2.4838.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import manyhands as mh


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        split = self.qkv(self.before_attention(x)).view(rows, length, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        seen = functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(rows, length, width))
        return x + self.mlp(self.before_mlp(x))


class Gpt(nn.Module):
    def __init__(self, characters: int, block: int, layers: int, width: int, dropout: float) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(characters, width), nn.Embedding(block, width)
        self.blocks = nn.Sequential(*(Block(width, width // 32, dropout) for _ in range(layers)), nn.LayerNorm(width))
        self.head = nn.Linear(width, characters, bias=False)
        self.head.weight = self.tokens.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                deep = name.endswith(("out.weight", "mlp.2.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if deep else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.tokens(tokens) + self.places.weight[: tokens.shape[1]]))

    @torch.no_grad()
    def sample(self, tokens: Tensor, length: int, block: int) -> Tensor:
        draw = torch.Generator().manual_seed(0)
        for _ in range(length):
            probabilities = self(tokens[None, -block:])[0, -1].softmax(0)
            tokens = torch.cat([tokens, torch.multinomial(probabilities, 1, generator=draw)])
        return tokens


def loss(model: nn.Module, windows: Tensor) -> Tensor:
    return functional.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


def read_text(path: Path | None) -> str:
    if path is not None:
        return path.read_text()
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))[:200_000]


def baselines(training: Tensor, test: Tensor, characters: int) -> tuple[float, float]:
    """Nats per character of the test text, by the frequencies of characters and of pairs in the training text."""
    single = torch.bincount(training, minlength=characters) + 1.0
    pairs = (
        torch.bincount(training[:-1] * characters + training[1:], minlength=characters**2).view(characters, -1) + 0.1
    )
    by_character = -(single / single.sum()).log()[test[1:]].mean()
    return float(by_character), float(-(pairs / pairs.sum(1, keepdim=True)).log()[test[:-1], test[1:]].mean())


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description="A character-level GPT.")
    parser.add_argument("--data", type=Path, help="a text file")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--block", type=int, default=64, help="characters of context")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64, help="a multiple of 32, the width of a head")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--lr", type=float, default=3e-3)
    options = parser.parse_args(arguments)

    text = read_text(options.data)
    alphabet = sorted(set(text))
    number = {character: index for index, character in enumerate(alphabet)}
    tokens = torch.tensor([number[character] for character in text])
    training, test = tokens[: len(tokens) * 9 // 10], tokens[len(tokens) * 9 // 10 :]
    windows = training.unfold(0, options.block + 1, 1)  # at every position; a view, which takes no memory
    test_windows = test.unfold(0, options.block + 1, options.block)

    hands = mh.join(strategy="mirrored", slices=4, clip_norm=1.0)  # the result does not depend on the number of workers
    model = Gpt(len(alphabet), options.block, options.layers, options.width, options.dropout)  # after join, which seeds
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.99), weight_decay=0.1)
    warm = max(1, options.steps // 10)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / warm, 0.55 + 0.45 * math.cos(math.pi * min(1.0, step / options.steps))),
    )
    model, optimizer = hands.setup(model, optimizer, scheduler)
    hands.resume()
    for batch in hands.batches(windows, batch_size=32, steps=options.steps):
        hands.backward(loss(model, batch))
        hands.step()
        if hands.stepped and hands.every(max(1, options.steps // 5)):
            hands.log(loss=hands.loss)  # printed, and written to the run's events

    found = hands.evaluate(test_windows, loss)["loss"]
    by_character, by_pair = baselines(training, test, len(alphabet))
    model.eval()
    # By every worker, not by the chief alone: of a sharded model none has all weights.
    sample = model.sample(test[: options.block], 100, options.block)[options.block :]
    if hands.is_chief:
        print(f"{found:.4f} nats per character of held-out text")
        print(f"  the frequencies of characters {by_character:.4f}, of pairs {by_pair:.4f}")
        print(" ".join("".join(alphabet[one] for one in sample).split()))
    return {"loss": found, "by character": by_character, "by pair": by_pair}


if __name__ == "__main__":
    main()
