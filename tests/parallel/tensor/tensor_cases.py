"""Models, and a few steps of training them, with their layers divided over ranks or whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import FileStore
from torch.nn import functional

from manyhands.comm.axis import Axis, Pending, connect
from manyhands.comm.shared_memory_axis import connect_plane
from manyhands.parallel.model.tensor_shard import TensorShard
from manyhands.parallel.tensor.apply_plan import split_model_
from manyhands.parallel.tensor.plan import plan_tensor
from manyhands.parallel.tensor.sharded_tensor import whole_of

CLASSES, WORDS, LENGTH = 5, 37, 6


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(12, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Dropout(0.3), nn.Linear(16, 8), nn.ReLU(inplace=True),
        nn.LayerNorm(8), nn.Sequential(nn.Linear(8, 24), nn.Dropout(0.2), nn.Tanh(), nn.Linear(24, CLASSES)),
    )  # fmt: skip


class Gated(nn.Module):
    """Custom code between layers, a residual, a layer used twice, frozen parameters, outputs in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(12, 20), nn.Linear(12, 20), nn.Linear(20, 12)
        self.temperature = nn.Parameter(torch.ones(1))
        self.cell = nn.GRU(12, 12, batch_first=True)
        self.head = nn.Linear(12, CLASSES)
        self.up.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for _ in range(2):
            x = x + self.down(functional.dropout(functional.silu(self.gate(x)) * self.up(x) * self.temperature, 0.2))
        hidden, _ = self.cell(x[:, None])
        up = self.up(x)
        up[:, 3] += 1.0
        tied = x @ self.gate.weight.T
        return {"logits": self.head(hidden[:, 0]), "extra": up.softmax(-1).sum() + tied.square().mean()}


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv2d(1, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.drop = nn.Dropout2d(0.2)
        self.deep = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.group = nn.GroupNorm(4, 8)
        self.two = nn.Conv2d(8, 4, 3, padding=1)
        self.last = nn.Sequential(
            nn.Conv2d(4, 8, 1), nn.InstanceNorm2d(8, affine=True), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(32, CLASSES),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(-1, 1, 4, 3)
        x = functional.pad(x, (0, 1))
        x = self.group(self.deep(functional.relu(self.drop(self.norm(self.one(x))))))
        return self.last(functional.max_pool2d(self.two(x), 1))[:, :CLASSES]


class Upwards(nn.Module):
    """Convolutions and their transposes, with a size asked for, and a part of it whole by name."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv1d(1, 8, 3, padding=1), nn.ReLU(), nn.ConvTranspose1d(8, 4, 2, 2))
        self.up = nn.ConvTranspose1d(4, 8, 3, stride=2)
        self.norm = nn.BatchNorm1d(8)
        self.back = nn.ConvTranspose1d(8, 4, 3, stride=2, padding=1, bias=False)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(self.down(x[:, None]), output_size=[50])
        return self.head(self.back(functional.gelu(self.norm(x))).mean(-1))


class Words(nn.Module):
    """An encoder and a decoder of torch's, with the output layer tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, 16, padding_idx=0)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, 0.2, batch_first=True), 2)
        self.decoder = nn.TransformerDecoderLayer(16, 4, 24, 0.1, "gelu", batch_first=True, norm_first=True)
        self.attention = nn.MultiheadAttention(16, 4, dropout=0.1, kdim=16, vdim=16)
        self.out = nn.Linear(16, WORDS)
        self.out.weight = self.table.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.table(words)
        causal, unseen = nn.Transformer.generate_square_subsequent_mask(words.size(1)), words == 0
        seen = self.encoder(x, src_key_padding_mask=unseen)
        y = self.decoder(x, seen, tgt_mask=causal, tgt_is_causal=True, memory_key_padding_mask=unseen)
        attended, weights = self.attention(y.transpose(0, 1), x.transpose(0, 1), x.transpose(0, 1))
        return self.out(y + attended.transpose(0, 1)) + weights.square().mean()


def gpt2(attention: str = "sdpa") -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=2, n_embd=16, n_head=4, vocab_size=WORDS, n_positions=8, bos_token_id=0, eos_token_id=0)
    config._attn_implementation = attention
    return GPT2LMHeadModel(config)


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 16, "num_attention_heads": 4, "intermediate_size": 24, "max_position_embeddings": 8}
    return BertForMaskedLM(BertConfig(num_hidden_layers=2, vocab_size=WORDS, **sizes))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 24}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, vocab_size=WORDS, attention_dropout=0.1, **sizes))


def qwen() -> nn.Module:
    """Norms of single heads inside the attention, and fewer heads for keys and values."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {"hidden_size": 16, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 2}
    return Qwen3ForCausalLM(Qwen3Config(num_hidden_layers=1, vocab_size=WORDS, intermediate_size=24, **sizes))


def neox() -> nn.Module:
    """Queries, keys and values of each head side by side in one weight."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    sizes = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 24, "max_position_embeddings": 8}
    return GPTNeoXForCausalLM(GPTNeoXConfig(num_hidden_layers=1, vocab_size=WORDS, attention_dropout=0.1, **sizes))


def bloom() -> nn.Module:
    """The same, with Bloom's code for the bias of scores and for an activation."""
    from transformers import BloomConfig, BloomForCausalLM

    sizes = {"hidden_size": 16, "n_head": 4, "n_layer": 1, "vocab_size": WORDS}
    return BloomForCausalLM(BloomConfig(attention_dropout=0.1, hidden_dropout=0.1, **sizes))


def falcon(**settings: Any) -> nn.Module:
    """Fewer keys and values than queries, in groups; or a bias of scores for each head."""
    from transformers import FalconConfig, FalconForCausalLM

    sizes = {"hidden_size": 16, "num_attention_heads": 8, "num_hidden_layers": 1, "vocab_size": WORDS}
    return FalconForCausalLM(FalconConfig(attention_dropout=0.1, **sizes, **settings))


def phi() -> nn.Module:
    """Norms of single heads, with biases."""
    from transformers import PhiConfig, PhiForCausalLM

    sizes = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 24, "num_hidden_layers": 1}
    return PhiForCausalLM(PhiConfig(vocab_size=WORDS, qk_layernorm=True, attention_dropout=0.1, **sizes))


class T5(nn.Module):
    """A table with a column for each head, which layers hand to each other; two sequences."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import T5Config, T5ForConditionalGeneration

        sizes = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4, "vocab_size": WORDS}
        self.model = T5ForConditionalGeneration(T5Config(dropout_rate=0.1, feed_forward_proj="gated-gelu", **sizes))

    def forward(self, x: Tensor) -> Tensor:
        return self.model(input_ids=x, decoder_input_ids=x.roll(1, 1)).logits


class Case(NamedTuple):
    make: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor]
    words: bool = False
    patterns: Mapping[str, str] | None = None
    sequence: bool = False


def _classes(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(model(x), y)


def _dict(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    found = model(x)
    return functional.cross_entropy(found["logits"], y) + 0.1 * found["extra"]


def _next_word(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    logits = model(x)
    return functional.cross_entropy(logits.view(-1, logits.size(-1)), y.view(-1), ignore_index=3, label_smoothing=0.1)


def _hugging_face(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return model(input_ids=x, labels=y).loss


MATRICES = {"0": "grid", "4": "columns", "7.0": "rows", "7.3": "vocabulary"}
CASES = {
    "mlp": Case(mlp, _classes),
    "mlp, other patterns": Case(mlp, _classes, patterns=MATRICES),
    "own code": Case(Gated, _dict),
    "convolutions": Case(Convolutional, _classes),
    "transposed convolutions": Case(Upwards, _classes),
    "transformer": Case(Words, _next_word, words=True),
    "gpt2": Case(gpt2, _hugging_face, words=True),
    "gpt2, eager": Case(lambda: gpt2("eager"), _hugging_face, words=True),
    "bert": Case(bert, _hugging_face, words=True),
    "neox": Case(neox, _hugging_face, words=True),
    "bloom": Case(bloom, _hugging_face, words=True),
    "falcon": Case(lambda: falcon(new_decoder_architecture=True, num_kv_heads=4), _hugging_face, words=True),
    "falcon, alibi": Case(lambda: falcon(multi_query=False, alibi=True), _hugging_face, words=True),
    "phi": Case(phi, _hugging_face, words=True),
    "t5": Case(T5, _next_word, words=True),
    "qwen": Case(qwen, _hugging_face, words=True),
    "llama": Case(llama, _hugging_face, words=True, patterns={"lm_head": "vocabulary"}),
}

for _name in ("transformer", "gpt2", "bert", "llama"):
    CASES[f"{_name}, by sequence"] = CASES[_name]._replace(sequence=True)


class Found(NamedTuple):
    losses: list[float]
    kinds: dict[str, str]
    gradients: dict[str, Tensor]
    """Of the last step, this rank's part."""
    weights: dict[str, Tensor]
    shares: dict[str, TensorShard]
    answer: Tensor
    """In evaluation."""
    collectives: Counter[tuple[str, str]]
    """How often ranks met in the first step: sums and gathers, by what they were for."""


@contextmanager
def an_axis(store: str, plane: bool) -> Iterator[Axis]:
    from manyhands.training.worker.worker import _current_session

    session = _current_session.get()[0]
    rank, size = session.identity.rank, session.identity.world_size
    session.set(f"here/{rank}", b"1")
    session.wait([f"here/{r}" for r in range(size)], timeout_s=100)  # a process that starts now takes its time
    if plane:
        memory = lambda num_bytes: session.shared_memory("tensor", num_bytes, size)  # noqa: E731
        axis: Axis = connect_plane(memory, rank, size, timeout_s=60, missing=lambda: "")
    else:
        peers = FileStore(store, size) if size > 1 else None
        axis = connect(peers, rank, size, address="127.0.0.1", device=torch.device("cpu"), timeout_s=60)
    yield axis
    axis.close()
    session.close()


@contextmanager
def counted(axis: Axis) -> Iterator[Counter[tuple[str, str]]]:
    """Counts the collectives of an axis, by kind and name."""
    collectives: Counter[tuple[str, str]] = Counter()

    def counting(kind: str, call: Callable[..., Pending]) -> Callable[..., Pending]:
        def count(*args: Any) -> Pending:
            collectives[kind, args[-1]] += 1
            return call(*args)

        return count

    kinds = {"sum": "sum_start", "gather": "all_gather_start", "scatter": "reduce_scatter"}
    for kind, name in kinds.items():
        setattr(axis, name, counting(kind, getattr(axis, name)))
    yield collectives
    for name in kinds.values():
        delattr(axis, name)


def train(store: str, name: str, steps: int = 3, plane: bool = False, half: bool = False) -> Found:
    """Steps with the same randomness on every rank, as a slice of a batch has it."""
    case = CASES[name]
    torch.manual_seed(5)
    model = case.make()
    # Not Adam: biases before BatchNorm, and of keys, have a true gradient of 0, whose rounding it would blow up.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with an_axis(store, plane) as axis:
        plan = plan_tensor(model, axis.size, case.patterns, sequence=case.sequence)
        shares = split_model_(model, plan, axis)
        with counted(axis) as collectives:
            losses = [_step(case, model, optimizer, 0, half)]
        losses += [_step(case, model, optimizer, number, half) for number in range(1, steps)]
        gradients = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
        model.eval()
        with torch.no_grad():
            answer = model(_batch(case, 99)[0])
        logits = answer["logits"] if isinstance(answer, Mapping) else answer
        kinds = {layer.name: layer.kind for layer in plan.layers}
        return Found(losses, kinds, gradients, dict(model.state_dict()), shares, whole_of(logits), collectives)


def _step(case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, number: int, half: bool) -> float:
    x, y = _batch(case, number)
    optimizer.zero_grad()
    torch.manual_seed(100 + number)
    with torch.autocast("cpu", torch.bfloat16) if half else nullcontext():
        loss = case.loss(model, x, y)
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def _batch(case: Case, number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    if case.words:
        words = torch.randint(1, WORDS, (3, LENGTH), generator=generator)
        words[:, -1] = 0 if case.make is Words else words[:, -1]
        return words, torch.randint(0, WORDS, (3, LENGTH), generator=generator)
    return torch.randn(10, 12, generator=generator), torch.randint(0, CLASSES, (10,), generator=generator)


def pasted(parts: list[dict[str, Tensor]], shares: list[dict[str, TensorShard]]) -> dict[str, Tensor]:
    """The wholes that ranks have together."""
    found = {}
    for name, first in parts[0].items():
        share = shares[0].get(name)
        if share is None:
            found[name] = first
            continue
        found[name] = torch.full(share.shape, torch.nan, dtype=first.dtype)
        for part, own in zip(parts, shares, strict=True):
            own[name].paste_(found[name], part[name])
    return found
