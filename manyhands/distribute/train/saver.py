"""`Saver`: the weights of a model in files of the user's choice, numbered by step, as TensorFlow 1 keeps them.

Files are safetensors. What a resumed run continues from (optimizer state, position in the data) is the run's own
checkpoint; `Saver` writes weights for use elsewhere, and reads them before a training begins. Start reading at
`WeightsSaver`.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import nn

import manyhands as mh
from manyhands.distribute.train.optimizers import GlobalStep
from manyhands.errors import CheckpointError, CheckpointMismatch, SpecError, UsageError
from manyhands.spec.keyword_check import checked_class, checked_keywords

__all__ = ["WeightsSaver", "latest_checkpoint"]

INDEX = "checkpoint"
ENDING = ".safetensors"
WHOLE = (mh.Mirrored, mh.Single, mh.ParameterServer, mh.CentralStorage, mh.LocalSGD)
"""Strategies under which every worker has all weights."""


@checked_class(name="Saver")
class WeightsSaver:
    """TensorFlow's `Saver`: `save` writes the model's weights on the chief, `restore` reads them before training.

    Args:
        var_list: The model.
        max_to_keep: How many of its newest files stay; None: all.
    """

    def __init__(self, var_list: nn.Module | None = None, max_to_keep: int | None = 5) -> None:
        if not isinstance(var_list, nn.Module):
            raise SpecError("A Saver needs the model whose weights it saves.", where="Saver", fix=["Saver(model)"])
        self._model, self.max_to_keep = var_list, max_to_keep
        self._shapes = {name: tuple(one.shape) for name, one in var_list.named_parameters()}
        self.last_checkpoints: list[str] = []
        """Its files that are still there, the newest last."""

    def save(self, sess: Any, save_path: str | Path, global_step: Any = None) -> str:
        """Write the weights to SAVE_PATH-STEP.safetensors, on the chief, and return that path on every worker.

        Args:
            sess: The session; None outside of one.
            save_path: The path without number and ending.
            global_step: The number. Default: the session's step.
        """
        self._check_whole(sess)
        if sess is not None and (global_step is None or isinstance(global_step, GlobalStep)):
            global_step = sess.global_step
        if isinstance(global_step, GlobalStep):
            raise SpecError(
                "Outside of a session it is not known which step this is.",
                where="Saver.save",
                fix=["saver.save(sess, path)", "global_step=1000"],
            )
        step = None if global_step is None else int(global_step)
        path = Path(f"{save_path}{'' if step is None else f'-{step}'}{ENDING}")
        if sess is None or sess.hands.is_chief:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Workers without a session may all write the same.
            partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
            safetensors.torch.save_model(self._model, str(partial))
            os.replace(partial, path)
            self._note(path)
        return str(path)

    def _check_whole(self, sess: Any) -> None:
        """`CheckpointError` where a worker has a part of the weights: a file of it would look complete."""
        strategy = sess.strategy if sess is not None else None
        lacking = [
            name
            for name, one in self._model.named_parameters()
            if tuple(one.shape) != self._shapes.get(name) or type(one).__name__ == "DTensor" or one.is_meta
        ]
        if lacking or (strategy is not None and not isinstance(strategy, WHOLE)):
            raise CheckpointError(
                f"Each worker has a part of the model's weights{f', such as of {lacking[0]}' if lacking else ''}: a "
                "Saver on the chief would write the chief's.",
                where="Saver.save",
                fix=["the run's checkpoints: mh ckpt export", "mh.Trainer.save", "strategy=mh.Mirrored()"],
            )

    def _note(self, path: Path) -> None:
        self.last_checkpoints = [one for one in self.last_checkpoints if one != str(path)] + [str(path)]
        while self.max_to_keep and len(self.last_checkpoints) > self.max_to_keep:
            Path(self.last_checkpoints.pop(0)).unlink(missing_ok=True)
        names = [Path(one).name for one in self.last_checkpoints]
        lines = [f'model_checkpoint_path: "{names[-1]}"', *(f'all_model_checkpoint_paths: "{one}"' for one in names)]
        partial = path.with_name(f".{INDEX}.{os.getpid()}.partial")
        partial.write_text("\n".join(lines) + "\n")
        os.replace(partial, path.with_name(INDEX))

    def restore(self, sess: Any, save_path: str | Path) -> None:
        """Read weights that `save` has written, before the session's first step: later the run's weights are shared.

        Args:
            sess: The session; None outside of one.
            save_path: The path that `save` returned.
        """
        if sess is not None and sess.has_begun:
            raise UsageError(
                f"The training is at step {sess.global_step}: its weights change in steps only.",
                where="Saver.restore",
                fix=["restore before the first run of the session"],
            )
        path = Path(save_path)
        path = path if path.name.endswith(ENDING) else path.with_name(path.name + ENDING)
        if not path.is_file():
            raise CheckpointError(f"There is no {path}.", where="Saver.restore", fix=["latest_checkpoint(directory)"])
        try:
            safetensors.torch.load_model(self._model, str(path))
        except (RuntimeError, safetensors.SafetensorError) as error:
            raise CheckpointMismatch(f"{path} does not fit the model: {error}", where="Saver.restore") from error


@checked_keywords
def latest_checkpoint(checkpoint_dir: str | Path) -> str | None:
    """The newest file that a `Saver` has written there; None if there is none."""
    try:
        text = (Path(checkpoint_dir) / INDEX).read_text()
    except FileNotFoundError:
        return None
    found = re.search(r'^model_checkpoint_path: "(.*)"$', text, re.M)
    return str(Path(checkpoint_dir) / found[1]) if found else None
