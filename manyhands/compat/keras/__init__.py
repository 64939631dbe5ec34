"""Keras's own `fit`, `evaluate`, `predict` and callbacks on all workers, for models that are made inside a scope.

`with scope(mh.Mirrored(workers=2)): model = ...; model.compile(...)`, then `model.fit(...)` outside or inside of it.
Keras's loop runs on every worker; it gets steps in place of batches, computes its slices of each, and has the sums of
all workers in its metrics and logs. May import `training.driven_training`, `training.setup`, `data`,
`observe.tensorboard` and public names. Start reading at `scope`.
"""

from manyhands.compat.keras.scope import KerasScope, scope

__all__ = ["KerasScope", "scope"]
