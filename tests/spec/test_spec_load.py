"""Which source wins, what is refused, and what the refusal says."""

import time

import msgspec
import pytest

from manyhands.errors import SpecError
from manyhands.spec.config_file import MAX_BYTES
from manyhands.spec.load import KEYS, dump_toml, resolve, torchrun_defaults, torchrun_task
from manyhands.spec.run import CheckpointSection, LaunchSection, RunSection, RunSpec, TrainSection


@pytest.fixture
def config(tmp_path):
    def write(text: str | bytes) -> str:
        path = tmp_path / "run.toml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return str(path)

    return write


def refused(**sources) -> SpecError:
    with pytest.raises(SpecError) as caught:
        resolve(**{"environ": {}, **sources})
    return caught.value


def test_nothing_given_is_all_defaults():
    resolved = resolve(environ={})
    assert resolved.spec == RunSpec()
    assert set(resolved.origins.values()) == {"default"}


def test_each_source_wins_over_the_ones_before_it_and_is_named(config):
    file = config('[run]\nseed = 1\n[train]\nprecision = "bf16"\naccumulate = 2\nslices = 3\n')
    resolved = resolve(
        config_file=file,
        environ={"MANYHANDS_PRECISION": "fp16", "MANYHANDS_ACCUMULATE": "4", "MANYHANDS_SLICES": "8"},
        arguments={"accumulate": 5, "slices": 9},
        flags={"slices": 10},
    )
    train, origins = resolved.spec.train, resolved.origins
    assert (resolved.spec.run.seed, train.precision, train.accumulate, train.slices) == (1, "fp16", 5, 10)
    assert origins["run.seed"] == f"{file} line 2"
    assert origins["train.precision"] == "MANYHANDS_PRECISION"
    assert origins["train.accumulate"] == "constructor"
    assert origins["train.slices"] == "--slices"
    assert origins["train.exact"] == "default"


def test_a_flag_that_overrides_the_script_is_reported_and_one_that_agrees_is_not():
    resolved = resolve(environ={}, arguments={"seed": 1, "slices": 4}, flags={"run.seed": 2, "train.slices": 4})
    assert resolved.overrides == ["--seed 2 overrides seed=1 in the script."]
    assert resolved.flags() == {"run.seed": 2, "train.slices": 4}


def test_the_config_file_may_be_named_by_the_environment(config):
    assert resolve(environ={"MANYHANDS_CONFIG": config("[run]\nseed = 7\n")}).spec.run.seed == 7


def test_none_counts_as_not_given_in_flags_and_arguments():
    assert resolve(environ={}, arguments={"seed": None}, flags={"slices": None}).spec == RunSpec()


@pytest.mark.parametrize(
    ("text", "says", "line", "fix"),
    [
        ("[run]\nsede = 1", "no setting sede in [run]", 2, "[run] seed"),
        ("\n[train]\nseed = 1", "seed belongs to [run]", 3, "[run]"),
        ("seed = 1", "seed belongs to [run]", 1, "[run]"),
        ("[trian]\nslices = 1", "no section [trian]", 1, "[train]"),
        ("train = 3", "train is a section", 1, "[train]"),
        ('train.precison = "bf16"', "no setting precison", 1, "[train] precision"),
        ('[run]\nseed = "one"', 'seed is "one", but must be a whole number', 2, "seed = 0"),
        ('[run]\nseed = "3"', "must be a whole number", 2, "seed = 0"),
        ("[run]\nseed = true", "seed is true", 2, "seed = 0"),
        ('[train]\nprecision = "bf6"', "must be one of fp32, bf16, fp16", 2, 'precision = "bf16"'),
        ("[train]\nslices = 0", "slices is 0, but must be at least 1", 2, "slices = 1"),
        ("[comm]\ntimeout_s = nan", "timeout_s is nan", 2, "timeout_s = 30.0"),
        ("[launch]\nlisten = '0.0.0.0'", "every interface", 2, "listen = the one address that the other hosts use"),
        ("[run]\nseed = {a = 1}", "seed is a dict", 2, "seed = 0"),
        ("[run]\nseed == 1", "Not valid TOML", 2, None),
        ("[train]\nprecision = bf16", "Not valid TOML", 2, 'text in quotes: precision = "bf16"'),
    ],
)
def test_a_mistake_in_the_file_names_its_line_and_the_right_words(config, text, says, line, fix):
    file = config(text)
    error = refused(config_file=file)
    assert says in error.what
    assert error.where == f"{file} line {line}"
    assert fix is None or fix in error.fix


def test_an_unknown_variable_of_ours_is_refused_with_the_nearest_one():
    error = refused(environ={"MANYHANDS_SEDE": "1"})
    assert "MANYHANDS_SEDE" in error.what
    assert error.fix == ("MANYHANDS_SEED",)


def test_variables_that_are_not_settings_are_known():
    environ = {"MANYHANDS_KEY_FILE": "k", "MANYHANDS_AGENT": "ipc://x", "HOME": "/"}
    assert resolve(environ=environ).spec == RunSpec()


@pytest.mark.parametrize(
    ("variable", "text", "section", "name", "value"),
    [
        ("MANYHANDS_EXACT", "true", "train", "exact", True),
        ("MANYHANDS_EXACT", "0", "train", "exact", False),
        ("MANYHANDS_CLIP_NORM", "1e-3", "train", "clip_norm", 1e-3),
        ("MANYHANDS_EVERY_S", "none", "checkpoint", "every_s", None),
        ("MANYHANDS_RUN_DIR", "17", "run", "run_dir", "17"),
        ("MANYHANDS_SEED", "", "run", "seed", 0),
    ],
)
def test_text_in_the_environment_becomes_the_type_of_its_key(variable, text, section, name, value):
    assert getattr(getattr(resolve(environ={variable: text}).spec, section), name) == value


def test_a_wrong_value_is_answered_in_the_words_of_its_source():
    assert refused(environ={"MANYHANDS_SEED": "x"}).fix == ("MANYHANDS_SEED=0",)
    assert refused(flags={"slices": 0}).fix == ("--slices 1",)
    assert refused(flags={"slices": 0}).where == "--slices"
    assert refused(arguments={"precision": "fp1"}).fix == ('precision="fp16"',)
    assert refused(arguments={"precison": "fp16"}).fix == ("precision",)
    assert refused(flags={"train.seed": 1}).fix == ("seed",)


@pytest.mark.parametrize(
    "content",
    [
        b'[run]\nrun_dir = "' + b"a" * 10_000_000 + b'"\n',
        b'[run]\nrun_dir = "' + b"a" * 100_000 + b'"\n',
        b"x = " + b"[" * 500_000,
        b"x = " + b"{a=" * 200_000,
        b"a." * 400_000 + b"b = 1",
        b"[" + b"a." * 400_000 + b"b]",
        b"a" * 900_000 + b" = 1",
        b"\xff\xfe\x00",
        b"\n".join(b"k%d = 1" % number for number in range(60_000)),
    ],
    ids=["10 MB", "long text", "arrays", "tables", "dotted key", "dotted header", "long key", "bytes", "many keys"],
)
def test_a_malicious_config_is_refused_soon_in_a_short_message(config, content):
    """Half a second of this process's own time at most, where nothing else runs; what is quadratic takes minutes."""
    file = config(content)
    started = time.process_time()
    error = refused(config_file=file)
    assert time.process_time() - started < 10.0
    assert len(str(error)) < len(file) + 1000


def test_the_size_limit_is_a_mebibyte(config):
    assert "larger than 1 MiB" in refused(config_file=config(b"#" * (MAX_BYTES + 1))).what
    assert resolve(environ={}, config_file=config(b"#" * MAX_BYTES)).spec == RunSpec()


def test_a_missing_config_file_and_a_directory_are_refused(tmp_path):
    assert "No such file" in refused(config_file=str(tmp_path / "none.toml")).what
    assert "directory" in refused(config_file=str(tmp_path)).what


def test_a_dumped_spec_loads_back_as_itself(config):
    spec = RunSpec(
        run=RunSection(run_dir='a "b"\\\n\x7fé\x01', seed=-3, overwrite=True),
        train=TrainSection(precision="bf16", slices=4, clip_norm=1e-30, exact=True),
        checkpoint=CheckpointSection(every_s=None, keep_best="max:accuracy"),
    )
    assert resolve(environ={}, config_file=config(dump_toml(spec))).spec == spec
    assert resolve(environ={}, config_file=config(dump_toml(RunSpec()))).spec == RunSpec()


def test_a_lossy_exchange_is_refused_where_the_same_bits_are_promised():
    error = refused(flags={"reducer": "int8"}, arguments={"exact": True})
    assert "rounds the gradients that workers send" in error.what
    assert error.where == "--reducer"
    assert list(error.fix) == ["--reducer exact", "exact=False"]
    error = refused(flags={"exact": True}, environ={"MANYHANDS_REDUCER": "bf16"})
    assert list(error.fix) == ["MANYHANDS_REDUCER=exact", "--no-exact"]


def test_elastic_bounds_are_said_in_the_words_of_each_source(config):
    for given in (
        {"flags": {"elastic": "2:8"}},
        {"flags": {"launch.elastic": [2, 8]}},
        {"arguments": {"elastic": (2, 8)}},
        {"environ": {"MANYHANDS_ELASTIC": "2:8"}},
        {"config_file": config("[launch]\nelastic = [2, 8]\n")},
        {"config_file": config('[launch]\nelastic = "2:8"\n')},
    ):
        assert resolve(**{"environ": {}, **given}).spec.launch.elastic == (2, 8), given
    assert resolve(environ={"MANYHANDS_ELASTIC": "none"}).spec.launch.elastic is None
    spec = RunSpec(launch=LaunchSection(elastic=(2, 8), workers=3))
    assert resolve(environ={}, config_file=config(dump_toml(spec))).spec == spec


@pytest.mark.parametrize(
    ("given", "says", "fix"),
    [
        ({"flags": {"elastic": "2:1"}}, "elastic is 2:1, but must be the minimum", "--elastic 1:2"),
        ({"flags": {"elastic": "0:4"}}, "elastic is 0:4, but must be the minimum", "--elastic 1:4"),
        ({"arguments": {"elastic": (3, 2)}}, "elastic is 3:2", "elastic=(2, 3)"),
        ({"environ": {"MANYHANDS_ELASTIC": "2"}}, "must be two whole numbers", "MANYHANDS_ELASTIC=2:8"),
        ({"flags": {"elastic": "a:b"}}, "must be two whole numbers", "--elastic 2:8"),
        ({"flags": {"elastic": "1:2:3"}}, "must be two whole numbers", "--elastic 2:8"),
        ({"arguments": {"elastic": 4}}, "must be two whole numbers", "elastic=(2, 8)"),
        ({"flags": {"elastic": "2:4", "workers": 5}}, "workers is 5, but must be within elastic, 2:4", "--workers 4"),
        ({"flags": {"elastic": "2:4", "workers": 1}}, "workers is 1, but must be within elastic, 2:4", "--workers 2"),
        (
            {"flags": {"elastic": "2:4", "workers": 4, "hosts_wanted": 2, "listen": "10.0.0.1"}},
            "workers is 4 on each of 2 hosts",
            "--workers 2",
        ),
        ({"flags": {"elastic": "2:4", "strategy": "single"}}, "strategy single has exactly one", "--strategy mirrored"),
        ({"flags": {"heartbeat_s": 0.1}}, "heartbeat_s is 0.1, but must be at least 1", "--heartbeat 1"),
        ({"flags": {"hang_s": 0.1}}, "hang_s is 0.1, but must be at least 1", "--hang 1"),
    ],
)
def test_elastic_settings_that_cannot_work_are_refused(given, says, fix):
    error = refused(**given)
    assert says in error.what
    assert error.fix[0] == fix


def test_no_two_settings_have_the_same_name():
    names = [
        field.name for section in msgspec.structs.fields(RunSpec) for field in msgspec.structs.fields(section.type)
    ]
    assert sorted(names) == sorted(KEYS)


def test_a_worker_of_torchrun_is_recognised_and_one_of_ours_is_not():
    environ = {"TORCHELASTIC_RUN_ID": "x", "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    task = torchrun_task(environ)
    assert task is not None
    assert (task.rank, task.world_size) == (1, 2)
    assert torchrun_task({**environ, "MANYHANDS_AGENT": "ipc://x"}) is None
    assert torchrun_task({}) is None


def test_pet_variables_are_defaults_of_torchruns_flags():
    assert torchrun_defaults({"PET_NNODES": "2", "HOME": "/"}) == {"nnodes": "2"}
