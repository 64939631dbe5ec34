"""What `mh demo` says, in English and in Chinese."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from rich.cells import cell_len, set_cell_size

__all__ = ["CHINESE", "ENGLISH", "Texts", "speaks_chinese", "table_line", "texts_for"]

WIDTHS = (15, 24, 7, 5, 8, 8, 6)
"""Columns of the table: with the spaces between them, a line has 79 cells."""


class Texts(NamedTuple):
    title: str
    columns: tuple[str, ...]
    labels: Mapping[str, str]
    divided: Mapping[str, str]
    """What a mode divides among its workers, by its name."""
    legend: str
    one_core: str
    not_run: str
    failed: str
    deviates: str
    kill_title: str
    killed: str
    stopped: str
    resumes: str
    interrupted: str
    kill_part: str
    core: str
    cores: str
    joined: str
    joining: str
    no_problems: str
    summary: str
    go_on: str
    notes: tuple[str, str, str]
    """What the three commands at the end are for."""
    cannot_write: str
    writable: str
    not_empty: str
    ended: str
    first_half: str
    events: Mapping[str, str]
    """Lines of the run in the second part, by event; empty: those of the run's own display."""


ENGLISH = Texts(
    title="One small network on handwritten digits, in ten modes.\nThe runs: {home}",
    columns=("mode", "what is divided", "rows/s", "MB", "KB/step", "distance", "right"),
    labels={
        "single": "single",
        "mirrored": "mirrored",
        "central_storage": "central storage",
        "servers_sync": "servers, sync",
        "servers_async": "servers, async",
        "local_sgd": "local SGD",
        "tensor": "tensor",
        "pipeline": "pipeline",
        "sharded": "sharded",
        "mesh": "mesh",
    },
    divided={
        "single": "nothing: one process",
        "mirrored": "the batch",
        "central_storage": "the batch; 1 weight copy",
        "servers_sync": "batch; weights on server",
        "servers_async": "batches; without waiting",
        "local_sgd": "batch; mean each 8 steps",
        "tensor": "every layer's weights",
        "pipeline": "the sequence of layers",
        "sharded": "batch, weights and state",
        "mesh": "batch and layers, 2 x 2",
    },
    legend=(
        "Two workers each; single has one, mesh four, and servers one server more.\n"
        "rows/s    rows trained on per second, by all workers together; one thread each,\n"
        "          on {cores} here\n"
        "MB        memory that training takes in a worker; the largest\n"
        "KB/step   gradients, weights or activations that a worker gives to others\n"
        "distance  of the weights from those of one process: the largest difference,\n"
        "          relative to the largest weight of its tensor\n"
        "right     of the {held_out} digits that were held out"
    ),
    one_core="There is one core: workers take turns on it, and none can be faster than single.",
    not_run="did not run here: {why}",
    failed="FAILED: {why}",
    deviates="DEVIATES by {distance}: this mode promises the weights of one process",
    kill_title="1. Two workers train on handwritten digits.\n   Run directory: {home}",
    killed="2. kill -9 {pid}: one worker is dead. The other continues; another starts.",
    stopped="3. SIGTERM has stopped the run at step {step}, with a checkpoint: exit code 75.",
    resumes="4. One worker resumes there; the number of workers does not change the result.",
    interrupted="Interrupted, in {where}. No process is left; what has ended is in {home}",
    kill_part="the part with the kill",
    core="1 core",
    cores="{cores} cores",
    joined="another joined",
    joining="another was starting when the run was stopped",
    no_problems="{twice} steps done twice, {lost} samples lost, {repeated} repeated",
    summary=(
        "What happened: {steps} steps in {slices} slices each, the first {stopped} by {first} workers\n"
        "(until one was killed), the rest by {second};\n"
        "{audited}.\n"
        "Killed: rank {rank} (pid {pid}). {after:.2f} s after it was detected, step {next_step} was\n"
        "committed without that worker; {joined}.\n"
        "Held-out digits: {accuracy:.2%} of {examples} correct, each counted once."
    ),
    go_on="It took {seconds:.0f} s, and {cpu_seconds:.0f} s of processor time. Go on with:",
    notes=("what that run did", "a mode once more, with its progress", "a larger network on the same digits"),
    cannot_write="The demo writes its runs to {home}, but cannot: {why}.",
    writable="mh demo --run-dir DIR, with a directory where you may write",
    not_empty="{home} is not empty, and the demo's runs start anew.",
    ended="The run ended with exit code {code}.",
    first_half="The first half ended with exit code {code}, not with 75.",
    events={},
)

CHINESE = Texts(
    title="同一个小网络、同一份手写数字，用十种方式训练。\n记录在 {home}",
    columns=("方式", "划分什么", "行/秒", "MB", "KB/步", "偏差", "正确率"),
    labels={
        "single": "单进程",
        "mirrored": "镜像",
        "central_storage": "集中存储",
        "servers_sync": "参数服务器同步",
        "servers_async": "参数服务器异步",
        "local_sgd": "本地 SGD",
        "tensor": "张量并行",
        "pipeline": "流水线并行",
        "sharded": "分片",
        "mesh": "网格",
    },
    divided={
        "single": "不划分，只有一个进程",
        "mirrored": "批次",
        "central_storage": "批次；权重只存一份",
        "servers_sync": "批次；权重在服务器上",
        "servers_async": "批次；更新互不等待",
        "local_sgd": "批次；每 8 步平均一次",
        "tensor": "每一层的权重",
        "pipeline": "前后相接的各层",
        "sharded": "批次、权重和优化器状态",
        "mesh": "批次和层，2 x 2",
    },
    legend=(
        "每种方式两个 worker；单进程一个，网格四个，参数服务器另加一个服务器进程。\n"
        "行/秒    全部 worker 合计每秒训练的样本行数；每个 worker 一个线程，本机 {cores}\n"
        "MB       训练使一个 worker 多占的内存，取最大的那个\n"
        "KB/步    每一步里一个 worker 交给其他进程的梯度、权重或激活值\n"
        "偏差     训练所得权重与单进程结果的最大差，相对于该张量的最大权重\n"
        "正确率   在 {held_out} 个没有参与训练的数字上"
    ),
    one_core="本机只有一个核：各 worker 轮流使用它，任何方式都不会比单进程快。",
    not_run="本机不能运行：{why}",
    failed="失败：{why}",
    deviates="偏差 {distance}，超出了限度：这种方式本应得到单进程的权重",
    kill_title="1. 两个 worker 训练手写数字。\n   训练目录：{home}",
    killed="2. kill -9 {pid}：一个 worker 挂了。另一个继续训练，替补正在启动。",
    stopped="3. SIGTERM 让训练停在第 {step} 步，并已保存检查点：退出码 75。",
    resumes="4. 由一个 worker 从那里接着训练；worker 的数量不影响结果。",
    interrupted="已中断（{where}）。没有留下任何进程；已完成的部分在 {home}",
    kill_part="杀进程的部分",
    core="1 核",
    cores="{cores} 核",
    joined="替补随后加入",
    joining="训练停止时替补还在启动",
    no_problems="重做 {twice} 步，丢失样本 {lost} 个，重复样本 {repeated} 个",
    summary=(
        "经过：共 {steps} 步，每步 {slices} 个切片；前 {stopped} 步由 {first} 个 worker 完成（其间一个被杀），\n"
        "其余由 {second} 个完成；{audited}。\n"
        "被杀的是 rank {rank}（pid {pid}）。发现后 {after:.2f} 秒，第 {next_step} 步在没有它的\n"
        "情况下提交；{joined}。\n"
        "未参与训练的数字：{examples} 个中答对 {accuracy:.2%}，每个只计一次。"
    ),
    go_on="共用 {seconds:.0f} 秒，其中处理器时间 {cpu_seconds:.0f} 秒。接下来可以试：",
    notes=("看那次训练做了什么", "把其中一种方式再跑一遍，带进度显示", "同样的数字，换一个大些的网络"),
    cannot_write="演示的训练要写到 {home}，但写不了：{why}。",
    writable="mh demo --run-dir DIR，换一个可以写的目录",
    not_empty="{home} 不是空目录，而演示的训练都要从头开始。",
    ended="训练以退出码 {code} 结束。",
    first_half="前一半训练的退出码是 {code}，应该是 75。",
    events={
        "LaunchStarted": "正在启动 {workers} 个 worker，导入 torch …",
        "RunStarted": "{workers} 个 worker 开始训练，共 {total_steps} 步；记录写在 {run}",
        "StepDone": "第 {step}/{total_steps} 步  损失 {loss:.4f}  每秒 {samples_per_s:.0f} 行",
        "WorkerLost": "丢失 {host} 上的 rank {rank}（pid {pid}）：{reason}",
        "GenerationStarted": "由 {workers} 个 worker 继续训练（世代 {generation}）",
        "CheckpointSaved": "已保存第 {step} 步的检查点（{num_bytes}，用时 {seconds:.2g} 秒）",
        "Resumed": "从第 {step} 步的检查点恢复：{path}",
        "Evaluated": "在第 {step} 步用 {rows} 个样本评估",
        "RunEnded": "训练完成，共 {step} 步",
        "RunEndedEarly": "训练停在第 {step} 步，退出码 {exit_code}",
    },
)


def speaks_chinese(environ: Mapping[str, str]) -> bool:
    """As the C library chooses a language for messages: the first of these variables that is set."""
    chosen = next((environ[name] for name in ("LC_ALL", "LC_MESSAGES", "LANG") if environ.get(name)), "")
    return chosen.lower().startswith("zh")


def texts_for(environ: Mapping[str, str], encoding: str | None) -> Texts:
    """Chinese where the environment asks for it and the output can show it."""
    try:
        CHINESE.title.encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return ENGLISH
    return CHINESE if speaks_chinese(environ) else ENGLISH


def table_line(cells: tuple[str, ...]) -> str:
    """One line of the table: words to the left, numbers to the right. A Chinese character takes two cells."""
    words = [set_cell_size(cell, width) for cell, width in zip(cells[:2], WIDTHS, strict=False)]
    numbers = [" " * (width - cell_len(cell)) + cell for cell, width in zip(cells[2:], WIDTHS[2:], strict=True)]
    return " ".join([*words, *numbers]).rstrip()
