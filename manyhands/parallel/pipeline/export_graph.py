"""The graph of a model's blocks and the operations between them, from `torch.export` on a copy without weights.

Nothing is computed. Blocks stay whole: in the exported graph each call of a block is a single node, so that the user's
modules run there later, in their current mode and with any later changes to them. Between them are a few torch
operations, for batches of any size. The user's model is not changed. Start reading at `trace`.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim
from torch.export.graph_signature import InputKind
from torch.nn.modules import transformer

from manyhands.errors import SpecError
from manyhands.parallel.model.pytrees import tree_flatten
from manyhands.parallel.pipeline.partition import Inputs
from manyhands.torch_private import pytree

__all__ = [
    "Call",
    "Trace",
    "bare_copy",
    "block_operation",
    "leaves_of",
    "no_mask_detection",
    "quiet",
    "trace",
    "without_cache",
]

PLAIN = (
    bool,
    int,
    float,
    str,
    bytes,
    complex,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)

_calls: list[Call] = []
"""The calls of the current trace; the operation's `call` argument is an index of this list."""


@functools.cache
def block_operation() -> Any:
    """The operation that represents a call of a block in a graph. It is only traced, and never runs."""
    library: Any = torch.library.Library("manyhands", "DEF")  # type: ignore[no-untyped-call]
    library.define("block(int call, Tensor[] tensors, SymInt[] sizes) -> Tensor[]")
    library._register_fake("block", lambda call, tensors, sizes: _calls[call].run_fake(tensors, sizes))
    _libraries.append(library)
    return torch.ops.manyhands.block.default


_libraries: list[torch.library.Library] = []
"""An operation exists only as long as its library."""


@dataclass
class Call:
    """One call of a block: how to build its arguments, and what it returns."""

    name: str
    """The module's name; with #2, #3, ... for its second and later calls."""
    module: str
    arguments: list[Any]
    """Leaves that are the same in every run of the graph; tensors and sizes, which are not, are marks."""
    spec: pytree.TreeSpec
    forward: Callable[..., Any]
    result: list[Any] = field(default_factory=list)
    result_spec: pytree.TreeSpec | None = None

    def fill(self, tensors: Sequence[Any], sizes: Sequence[Any]) -> Inputs:
        given = {_TENSOR: iter(tensors), _SIZE: iter(sizes)}
        leaves = [next(given[leaf]) if isinstance(leaf, _Mark) else leaf for leaf in self.arguments]
        return Inputs(*pytree.tree_unflatten(leaves, self.spec))

    def run_fake(self, tensors: Sequence[Tensor], sizes: Sequence[Any]) -> list[Tensor]:
        inputs = self.fill(tensors, sizes)
        self.result, self.result_spec = tree_flatten(self.forward(*inputs.args, **inputs.kwargs))
        return [torch.empty_like(leaf) for leaf in self.result if isinstance(leaf, Tensor)]

    def unflatten(self, tensors: Sequence[Tensor]) -> Any:
        assert self.result_spec is not None
        given = iter(tensors)
        leaves = [next(given) if isinstance(leaf, Tensor) else leaf for leaf in self.result]
        return pytree.tree_unflatten(leaves, self.result_spec)


class _Mark(str):
    """Placeholder for a value that differs from run to run."""


_TENSOR, _SIZE = _Mark("tensor"), _Mark("size")


@dataclass
class Trace:
    """The graph of a model for one kind of inputs."""

    graph_module: fx.GraphModule
    calls: list[Call]
    attributes: dict[str, str | Tensor]
    """Placeholders that are not inputs -> the parameter's or buffer's name in the model; or a constant."""
    parameters: set[str]
    """Placeholders of parameters."""
    inputs: list[str]
    """Placeholders of the input tensors, in their order."""
    constants: list[Any]
    """The inputs that are not tensors."""
    output: list[Any]
    output_spec: pytree.TreeSpec

    def fits(self, inputs: Inputs) -> bool:
        """Whether the graph can run with these inputs: dynamic sizes may differ from the traced ones, if above 1."""
        tensors, constants = leaves_of(inputs)
        if constants != self.constants or len(tensors) != len(self.inputs):
            return False
        sizes: dict[str, int] = {}
        for name, tensor in zip(self.inputs, tensors, strict=True):
            expected = self._expected[name]
            if tensor.dtype != expected.dtype or tensor.dim() != expected.dim():
                return False
            for known, size in zip(expected.shape, tensor.shape, strict=True):
                if isinstance(known, int) and known != size:
                    return False
                if not isinstance(known, int) and (size < 2 or sizes.setdefault(str(known), size) != size):
                    return False
        return True

    @functools.cached_property
    def _expected(self) -> dict[str, Tensor]:
        return {node.name: node.meta["val"] for node in self.graph_module.graph.nodes if node.op == "placeholder"}

    def rebuild(self, tensors: Sequence[Any]) -> Any:
        """The model's output from its tensors."""
        given = iter(tensors)
        leaves = [next(given) if isinstance(leaf, _Mark) else leaf for leaf in self.output]
        return pytree.tree_unflatten(leaves, self.output_spec)


def leaves_of(inputs: Inputs) -> tuple[list[Tensor], list[Any]]:
    """The tensors, and the structure and other leaves, with marks for the tensors."""
    leaves, spec = tree_flatten(inputs)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return tensors, [str(spec), *(_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves)]


def bare_copy(model: nn.Module) -> nn.Module:
    """The same modules with parameters that have shapes but no memory; buffers are copied."""
    memo: dict[int, Any] = {}
    for param in model.parameters():
        bare = nn.Parameter(torch.empty_like(param, memory_format=torch.contiguous_format), param.requires_grad)
        bare.untyped_storage().resize_(0)
        memo[id(param)] = bare
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        raise _not_exportable(model, error) from None


def trace(bare: nn.Module, blocks: Sequence[str], inputs: Inputs) -> Trace:
    """Trace the model on such inputs, in its current mode; `SpecError` with torch's reason if that fails."""
    tensors, constants = leaves_of(inputs)
    _check_plain("The model is called with", constants)
    shell = _Shell(bare, blocks, inputs)
    # A size of 1 broadcasts, unlike other sizes: torch keeps it fixed, and would warn.
    shapes = tuple({dim: Dim.AUTO for dim, size in enumerate(t.shape) if size > 1} for t in tensors)
    calls: list[Call] = []
    with _blocks_as_operations(bare, blocks, calls), no_mask_detection(), quiet():
        try:
            # Copies, because a tensor that is passed twice would be traced as one input.
            examples = tuple(tensor.detach().clone() for tensor in tensors)
            program = torch.export.export(shell, examples, dynamic_shapes=(shapes,), strict=False)
        except SpecError:
            raise
        except Exception as error:
            raise _not_exportable(bare, error) from None  # torch's full message fills pages
    attributes: dict[str, str | Tensor] = {}
    given: list[str] = []
    specs = program.graph_signature.input_specs
    for spec in specs:
        if spec.kind == InputKind.USER_INPUT:
            given.append(spec.arg.name)
        elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            attributes[spec.arg.name] = str(spec.target).removeprefix("model.")
        else:
            attributes[spec.arg.name] = program.constants[str(spec.target)]
    parameters = {spec.arg.name for spec in specs if spec.kind == InputKind.PARAMETER}
    return Trace(program.graph_module, calls, attributes, parameters, given, constants, shell.output, shell.output_spec)


class _Shell(nn.Module):
    """The model as a function from its input tensors to its output tensors."""

    output: list[Any]
    output_spec: pytree.TreeSpec

    def __init__(self, model: nn.Module, blocks: Sequence[str], inputs: Inputs) -> None:
        super().__init__()
        self.model, self._blocks, self._inputs = model, tuple(f"{block}." for block in blocks), inputs
        self.train(model.training)

    def train(self, mode: bool = True) -> _Shell:
        self.training = mode  # do not change the modes of the model's modules
        return self

    def forward(self, *tensors: Tensor) -> list[Tensor]:
        leaves, spec = pytree.tree_flatten(self._inputs)
        given = iter(tensors)
        args, kwargs = pytree.tree_unflatten([next(given) if isinstance(x, Tensor) else x for x in leaves], spec)
        before = self._buffers_between()
        result = self.model(*args, **kwargs, **without_cache(self.model, kwargs))
        _check_unchanged(self.model, before, self._buffers_between())
        leaves, self.output_spec = tree_flatten(result)
        self.output = [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        _check_plain("The model returns", self.output)
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def _buffers_between(self) -> dict[str, tuple[int, int]]:
        """The id of each buffer outside of blocks, and how often it was written to."""
        found = ((name, one) for name, one in self.model.named_buffers() if not name.startswith(self._blocks))
        return {name: (id(one), one._version) for name, one in found}


def _check_unchanged(model: nn.Module, before: dict[str, tuple[int, int]], after: dict[str, tuple[int, int]]) -> None:
    """A block's buffers belong to its stage; all stages have those between blocks, and none would send its changes."""
    for name, known in after.items():
        if before.get(name) != known:
            raise SpecError(
                f"{type(model).__name__} changes its buffer {name} outside of its blocks, where no stage keeps it.",
                fix=["a submodule that has the buffer and changes it", "mh.TensorParallel or mh.Sharded"],
            )


def without_cache(model: nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Hugging Face's decoders cache keys and values for generation by default; training does not need them."""
    known = "use_cache" in inspect.signature(model.forward).parameters and "use_cache" not in kwargs
    return {"use_cache": False} if known else {}


class _blocks_as_operations:  # noqa: N801 - a context manager
    """Inside, calls of these modules are single operations, recorded in `calls`."""

    def __init__(self, model: nn.Module, blocks: Sequence[str], calls: list[Call]) -> None:
        self._modules = {name: model.get_submodule(name) for name in blocks}
        # A compiled module's forward is an attribute of the instance, and must be restored for the next trace.
        self._own = {name: module.__dict__["forward"] for name, module in self._modules.items() if _has_own(module)}
        self._calls = calls

    def __enter__(self) -> None:
        _calls[:] = []
        for name, module in self._modules.items():
            module.forward = self._recording(name, module.forward)
            # Hooks run with the module itself; here they would be traced as operations between blocks.
            for hooks in (module._forward_hooks, module._forward_pre_hooks):
                hooks.clear()

    def __exit__(self, *_: object) -> None:
        self._calls += _calls
        _calls[:] = []
        for name, module in self._modules.items():
            del module.forward
            if name in self._own:
                module.forward = self._own[name]

    def _recording(self, name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(*args: Any, **kwargs: Any) -> Any:
            leaves, spec = tree_flatten((args, kwargs))
            tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            sizes = [leaf for leaf in leaves if isinstance(leaf, torch.SymInt)]
            arguments = [_marked(leaf) for leaf in leaves]
            _check_plain(f"Block {name} is called with", arguments)
            before = sum(call.module == name for call in _calls)
            call = Call(f"{name}#{before + 1}" if before else name, name, arguments, spec, forward)
            _calls.append(call)
            return call.unflatten(block_operation()(len(_calls) - 1, tensors, sizes))

        return recorded


def _has_own(module: nn.Module) -> bool:
    return "forward" in module.__dict__


@contextmanager
def no_mask_detection() -> Iterator[None]:
    """`nn.TransformerEncoder` compares its mask with a causal one to set a hint, which the result does not need.

    A trace has no values to compare, so the hint is the value that the model passes.
    """
    before = getattr(transformer, "_detect_is_causal_mask", None)
    if before is None:
        yield
        return
    transformer._detect_is_causal_mask = lambda mask, is_causal=None, size=None: bool(is_causal)
    try:
        yield
    finally:
        transformer._detect_is_causal_mask = before


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress torch's long output about what it cannot trace, which our error reports, and its warnings."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stderr(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _marked(leaf: Any) -> Any:
    return _TENSOR if isinstance(leaf, Tensor) else _SIZE if isinstance(leaf, torch.SymInt) else leaf


def _check_plain(what: str, leaves: Sequence[Any]) -> None:
    for leaf in leaves:
        if not isinstance(leaf, PLAIN):
            raise SpecError(
                f"{what} a {type(leaf).__name__}, which cannot be sent from stage to stage.",
                fix=[
                    "tensors, numbers and None, in tuples, lists, dicts and dataclasses",
                    "a pipeline over a nn.Sequential",
                ],
            )


def _not_exportable(model: nn.Module, error: Exception) -> SpecError:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return SpecError(
        f"{type(model).__name__} cannot be cut into stages: {type(error).__name__}: {lines[0] if lines else ''}",
        where=_line_of_the_model(error),
        fix=[
            "a nn.Sequential, which is cut without being traced",
            "mh.TensorParallel or mh.Sharded, which do not cut the model into stages",
        ],
    )


def _line_of_the_model(error: Exception) -> str | None:
    """The innermost line of the user's code in the traceback."""
    libraries = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.line and not frame.filename.startswith(libraries)
    ]
    return f"{frames[-1].filename} line {frames[-1].lineno}: {frames[-1].line}" if frames else None
