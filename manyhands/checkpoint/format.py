"""The format of a checkpoint on disk: names, the manifest, and its seal. Pure: bytes in, values out.

    <root>/step-00001800/
        shard-00001-of-00003.safetensors     tensors, split by size
        state.json                           everything that is not a tensor
        MANIFEST.json                        list of files, with sizes and SHA-256; sealed with its own SHA-256
    <root>/step-00001800.2/                  the same step saved again, later
    <root>/step-00001800.set-aside/          its weights may be wrong; no run resumes from it
    <root>/step-00001800.tmp-<uuid>/         being written, or being removed; never a checkpoint
    <root>/LATEST                            name and manifest digest of the last commit: a hint, and proof of one

Reading and writing are in `reader` and `writer`. Start reading at `Manifest`.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec

from manyhands.errors import CheckpointCorrupt, CheckpointTooNew

__all__ = [
    "DTYPE_BYTES",
    "FORMAT",
    "LATEST",
    "MANIFEST",
    "MODEL",
    "SET_ASIDE",
    "STATE",
    "FileEntry",
    "Manifest",
    "StepName",
    "TensorEntry",
    "decode_state",
    "encode_state",
    "fingerprint",
    "finite_results",
    "is_possible",
    "is_temp_name",
    "latest_temp_name",
    "parse_latest",
    "parse_step_name",
    "plan_shards",
    "seal",
    "shard_name",
    "temp_name",
    "unseal",
]

FORMAT = 1
MANIFEST, STATE, LATEST = "MANIFEST.json", "state.json", "LATEST"
SET_ASIDE = ".set-aside"
MODEL = "model/"
"""Tensors under this prefix belong to the model: fingerprinted, refused if not finite, and exported."""

# Limits on what a reader reads at all, so that a hostile file costs bounded time and memory.
MAX_MANIFEST_BYTES = 64 * 2**20
MAX_STATE_BYTES = 256 * 2**20
MAX_NAME_CHARS = 4096
MAX_TENSORS_PER_SHARD = 2**16
MAX_DIMS = 64

DTYPE_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "C64": 8, "BOOL": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1,
    "F8_E4M3": 1, "F8_E4M3FNUZ": 1, "F8_E5M2": 1, "F8_E5M2FNUZ": 1,
}  # fmt: skip

_STEP_NAME = re.compile(r"step-(\d{8,18})(?:\.([1-9]\d{0,8}))?")
_TEMP_NAME = re.compile(r"(?:step-\d{8,18}|LATEST)\.tmp-[0-9a-f]{32}")
_LATEST = re.compile(rb"(step-[0-9.]{8,30}) [0-9a-f]{64}\n")
_FILE_NAME = r"^(shard-\d{5}-of-\d{5}\.safetensors|state\.json)\Z"

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Sha256 = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
_Text = Annotated[str, msgspec.Meta(max_length=MAX_NAME_CHARS)]


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: Annotated[str, msgspec.Meta(pattern=_FILE_NAME)]
    size: _Count
    sha256: _Sha256


class TensorEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    shard: _Text
    dtype: _Text
    shape: Annotated[list[_Count], msgspec.Meta(max_length=MAX_DIMS)]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


def is_possible(dtype: str, shape: Sequence[int]) -> bool:
    """Whether such a tensor can exist. Other dimensions count even if one is 0: strides must fit in 63 bits."""
    if dtype not in DTYPE_BYTES or len(shape) > MAX_DIMS or any(dim < 0 for dim in shape):
        return False
    return math.prod(max(1, dim) for dim in shape) * DTYPE_BYTES[dtype] < 2**63


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What must exist for the directory to be a checkpoint. Adding a field needs a new format number."""

    format: int = FORMAT
    run: _Text
    generation: tuple[_Count, _Count]
    """(term, counter) of the generation that wrote it; commits of a lower generation are refused."""
    sequence: _Count
    """Counts commits in this root: the newest checkpoint has the highest, even after a return to an earlier step."""
    step: _Count
    epoch: _Count
    world_size: _Count
    """Number of workers, for information: a checkpoint loads on any number."""
    slices: _Count
    results: dict[_Text, float] = {}
    """Evaluation results at this step, for keep_best; finite ones only."""
    files: list[FileEntry]
    tensors: dict[_Text, TensorEntry]
    model: _Sha256
    """`fingerprint` of the model's tensors."""

    @property
    def num_bytes(self) -> int:
        return sum(entry.size for entry in self.files)

    def by_shard(self) -> dict[str, dict[str, TensorEntry]]:
        """The shards that contain tensors, sorted by name."""
        shards: dict[str, dict[str, TensorEntry]] = {}
        for name, entry in self.tensors.items():
            shards.setdefault(entry.shard, {})[name] = entry
        return dict(sorted(shards.items()))


class StepName(NamedTuple):
    """A checkpoint directory's name; sorts by step, then by the number of times that step was saved."""

    step: int
    repeat: int = 1

    def __str__(self) -> str:
        return f"step-{self.step:08d}" + (f".{self.repeat}" if self.repeat > 1 else "")


def parse_step_name(name: str) -> StepName | None:
    match = _STEP_NAME.fullmatch(name)
    if match is None:
        return None
    parsed = StepName(int(match[1]), int(match[2] or 1))
    return parsed if str(parsed) == name else None


def temp_name(step: int) -> str:
    return f"{StepName(step)}.tmp-{uuid.uuid4().hex}"


def latest_temp_name() -> str:
    return f"{LATEST}.tmp-{uuid.uuid4().hex}"


def parse_latest(raw: bytes) -> StepName | None:
    """The checkpoint that LATEST names; None if the file is not valid."""
    match = _LATEST.fullmatch(raw)
    return parse_step_name(match[1].decode()) if match else None


def is_temp_name(name: str) -> bool:
    return _TEMP_NAME.fullmatch(name) is not None


def shard_name(index: int, count: int) -> str:
    """`index` runs from 1 to `count`, as in the name."""
    if not 1 <= index <= count <= 99_999:
        raise ValueError(f"shard {index} of {count}: the index runs from 1 to the count, and the count to 99999")
    return f"shard-{index:05d}-of-{count:05d}.safetensors"


def plan_shards(sizes: Mapping[str, int], max_bytes: int) -> list[list[str]]:
    """Names per shard, in the given order; a tensor above `max_bytes` gets a separate shard."""
    shards: list[list[str]] = []
    filled = 0
    for name, size in sizes.items():
        if not shards or filled + size > max_bytes or len(shards[-1]) >= MAX_TENSORS_PER_SHARD:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def fingerprint(tensors: Mapping[str, TensorEntry]) -> str:
    """SHA-256 over the sorted (name, dtype, shape) of the model's tensors: equal for equal architectures."""
    rows = sorted((name, entry.dtype, entry.shape) for name, entry in tensors.items() if name.startswith(MODEL))
    return hashlib.sha256(msgspec.json.encode(rows)).hexdigest()


# The seal: the last field of the file is the SHA-256 of every byte before it. It can be checked without parsing the
# rest, so a flipped bit can be distinguished from a later format, in this version and every later one.
_SEAL = re.compile(rb',"sha256":"([0-9a-f]{64})"}\n')
_SEAL_BYTES = 78


def seal(manifest: Manifest) -> bytes:
    body = msgspec.json.encode(manifest)[:-1]
    return body + b',"sha256":"' + hashlib.sha256(body).hexdigest().encode() + b'"}\n'


def unseal(raw: bytes, where: str) -> Manifest:
    """The manifest in `raw`; CheckpointCorrupt or CheckpointTooNew, with `where`, if it is not valid."""
    body, tail = raw[:-_SEAL_BYTES], _SEAL.fullmatch(raw[-_SEAL_BYTES:])
    if tail is None or hashlib.sha256(body).hexdigest().encode() != tail[1]:
        raise CheckpointCorrupt(f"{where} does not match its own checksum: it is truncated or changed.")
    body += b"}"
    try:
        version = msgspec.json.decode(body, type=_Version).format
        if version > FORMAT:
            raise CheckpointTooNew(
                f"{where} has format {version}; this manyhands reads up to {FORMAT}.",
                fix=["pip install --upgrade manyhands"],
            )
        manifest = msgspec.json.decode(body, type=Manifest)
    except (msgspec.DecodeError, RecursionError) as error:
        raise CheckpointCorrupt(f"{where} is not a manifest: {error}.") from error
    _check(manifest, where)
    return manifest


class _Version(msgspec.Struct):
    format: Annotated[int, msgspec.Meta(ge=1)]


def _check(manifest: Manifest, where: str) -> None:
    names = {entry.name for entry in manifest.files}
    for name, entry in manifest.tensors.items():
        if entry.shard not in names or not is_possible(entry.dtype, entry.shape):
            raise CheckpointCorrupt(f"{where} describes tensor {name!r} as {entry}, which is impossible.")
    if len(names) != len(manifest.files) or STATE not in names:
        raise CheckpointCorrupt(f"{where} must list {STATE}, and every file once.")
    if fingerprint(manifest.tensors) != manifest.model:
        raise CheckpointCorrupt(f"{where}: the model's fingerprint does not match the listed tensors.")


def encode_state(state: Mapping[str, Any]) -> bytes:
    """JSON that decodes to an equal value, including nan, infinities and big integers (which msgspec's JSON lacks).

    Tuples become lists. Anything else that JSON would change or drop is a TypeError with its path.
    """
    _refuse_lossy(state, "state")
    raw = json.dumps(state).encode()
    if len(raw) > MAX_STATE_BYTES:
        raise ValueError(f"it takes {len(raw)} bytes, but the limit is {MAX_STATE_BYTES}; store large data in tensors")
    return raw


def decode_state(raw: bytes) -> dict[str, Any]:
    """The inverse of `encode_state`; ValueError or RecursionError on anything else."""
    state = json.loads(raw)
    if not isinstance(state, dict):
        raise ValueError(f"state is a {type(state).__name__}, not an object")
    return state


def _refuse_lossy(value: Any, path: str) -> None:
    # Exact types: an IntEnum or a numpy float64 would pass isinstance and be loaded as another type.
    if type(value) is dict:
        for key, item in value.items():
            if type(key) is not str:
                raise TypeError(f"{path} has the key {key!r}; keys must be strings")
            _refuse_lossy(item, f"{path}[{key!r}]")
    elif type(value) in (list, tuple):
        for index, item in enumerate(value):
            _refuse_lossy(item, f"{path}[{index}]")
    elif value is not None and type(value) not in (str, int, float, bool):
        raise TypeError(f"{path} is a {type(value).__name__}; state may have dict, list, str, int, float, bool, None")


def finite_results(results: Mapping[str, float]) -> dict[str, float]:
    return {name: float(value) for name, value in results.items() if math.isfinite(value)}
