"""Workers that compile nothing do not load torch's compiler, and those that do get it as torch means it."""

import json
import subprocess
import sys

SCRIPT = """
import json, sys
from manyhands.launcher.worker_process.lazy_compiler import load_compiler_late
load_compiler_late()
import torch
load_compiler_late()

def train():
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())

names = ("add_param_group", "state_dict", "load_state_dict")
methods = [getattr(torch.optim.Optimizer, name).__wrapped__ for name in names]
train()
from manyhands.launcher.worker_process.process_settings import make_deterministic
make_deterministic()
found = {"loaded": "torch._dynamo" in sys.modules}
import torch._dynamo, torch._inductor.config
found["deterministic"] = torch.are_deterministic_algorithms_enabled(), torch._inductor.config.deterministic
found["left"] = [hasattr(method, "__dynamo_disable") for method in methods]
train()
found["torch's own"] = [method.__dynamo_disable is not method for method in methods]
found["compiles"] = torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)).item()
print(json.dumps(found))
"""


def test_the_compiler_is_loaded_when_it_is_asked_for_and_then_in_torchs_own_way():
    ran = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == {
        "loaded": False,
        "deterministic": [True, True],
        "left": [False] * 3,
        "torch's own": [True] * 3,
        "compiles": 2.0,
    }
