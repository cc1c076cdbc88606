"""Loading from the Hub, against a server of the same answers: what works, and how each failure reads."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cli.conftest import save_target
from drafters.checkpoints import write, zlab_config, zlab_weights
from hf_ddtree import DFlashModel
from hub import loads
from hub.server import TOKEN, Hub

SHARD = "model-00002-of-00003.safetensors"


def publish(hub: Hub, root: Path) -> None:
    weights = zlab_weights()
    hub.add("z-lab/single", write(root / "single", zlab_config(), weights))
    hub.add("z-lab/sharded", write(root / "sharded", zlab_config(), weights, shards=3))
    hub.add("z-lab/single", write(root / "older", zlab_config(), zlab_weights(seed=1)), revision="v1")
    write(root / "nested" / "drafter", zlab_config(), weights)
    hub.add("z-lab/nested", root / "nested")
    hub.add("z-lab/gated", root / "single")
    hub.gated.add("z-lab/gated")
    broken = {
        "no-config": "config.json",
        "no-weights": "model.safetensors",
        "no-shard": SHARD,
    }
    for name, missing in broken.items():
        shutil.copytree(root / ("sharded" if missing == SHARD else "single"), root / name)
        (root / name / missing).unlink()
        hub.add(f"z-lab/{name}", root / name)
    torch.save(weights, write(root / "pickle", zlab_config(), weights) / "pytorch_model.bin")
    (root / "pickle" / "model.safetensors").unlink()
    hub.add("z-lab/pickle", root / "pickle")
    shutil.copytree(root / "single", root / "bad-config")
    (root / "bad-config" / "config.json").write_text('{"architectures": ["DFlash')
    hub.add("z-lab/bad-config", root / "bad-config")
    shutil.copytree(root / "sharded", root / "damaged")
    shard = root / "damaged" / SHARD
    shard.write_bytes(shard.read_bytes()[:-100])
    hub.add("z-lab/damaged", root / "damaged")
    hub.add("z-lab/cut", write(root / "cut", zlab_config(), weights, shards=2))
    hub.cut.add("model-00001-of-00002.safetensors")
    save_target(root / "plain")
    hub.add("org/plain", root / "plain")


JOBS: list[dict[str, Any]] = [
    {"name": "single", "repository": "z-lab/single"},
    {"name": "sharded", "repository": "z-lab/sharded"},
    {"name": "auto", "repository": "z-lab/sharded", "loader": "auto"},
    {"name": "causal", "repository": "z-lab/single", "loader": "causal"},
    {"name": "plain", "repository": "org/plain", "loader": "causal"},
    {"name": "dtype", "repository": "z-lab/single", "dtype": "bfloat16", "device_map": "cpu"},
    {"name": "revision", "repository": "z-lab/single", "revision": "v1"},
    {"name": "subfolder", "repository": "z-lab/nested", "subfolder": "drafter"},
    {"name": "auto subfolder", "repository": "z-lab/nested", "subfolder": "drafter", "loader": "auto"},
    {"name": "token", "repository": "z-lab/gated", "token": TOKEN},
    {"name": "gated", "repository": "z-lab/gated", "cache_dir": "{other}"},
    {"name": "auto gated", "repository": "z-lab/gated", "loader": "auto", "cache_dir": "{other}"},
    {"name": "no repository", "repository": "z-lab/nothing"},
    {"name": "no revision", "repository": "z-lab/single", "revision": "v9"},
    {"name": "no config", "repository": "z-lab/no-config"},
    {"name": "no weights", "repository": "z-lab/no-weights"},
    {"name": "no shard", "repository": "z-lab/no-shard"},
    {"name": "pickle", "repository": "z-lab/pickle"},
    {"name": "bad config", "repository": "z-lab/bad-config"},
    {"name": "auto bad config", "repository": "z-lab/bad-config", "loader": "auto"},
    {"name": "damaged", "repository": "z-lab/damaged"},
    {"name": "cut", "repository": "z-lab/cut"},
    {"name": "cached", "repository": "z-lab/sharded", "local_files_only": True},
    {"name": "auto cached", "repository": "z-lab/sharded", "local_files_only": True, "loader": "auto"},
    {"name": "not cached", "repository": "z-lab/sharded", "local_files_only": True, "cache_dir": "{other}"},
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hub")


@pytest.fixture(scope="module")
def results(root: Path) -> Iterator[dict[str, Any]]:
    hub = Hub()
    publish(hub, root)
    jobs = json.loads(json.dumps(JOBS).replace("{other}", str(root / "other")))
    with hub.serving():
        environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING_FACE", "http"))},
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(root / "home"),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_XET": "1",
            "NO_PROXY": "127.0.0.1",
            "OMP_NUM_THREADS": "1",
        }
        done = subprocess.run(
            [sys.executable, loads.__file__],
            input=json.dumps(jobs),
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    yield {**json.loads(done.stdout.splitlines()[-1]), "requests": hub.requests}


def checksum(seed: int = 0, dtype: torch.dtype = torch.float32) -> float:
    return sum(value.to(dtype).double().abs().sum().item() for value in zlab_weights(seed=seed).values())


@pytest.mark.parametrize(
    "name",
    ["single", "sharded", "auto", "causal", "subfolder", "auto subfolder", "token", "cached", "auto cached"],
)
def test_loads(results: dict[str, Any], name: str) -> None:
    result = results[name]
    assert result.get("class") == "DFlashModel", result
    assert result["checksum"] == pytest.approx(checksum())


def test_dtype_and_device_map(results: dict[str, Any]) -> None:
    assert results["dtype"]["dtype"] == "torch.bfloat16"
    assert results["dtype"]["checksum"] == pytest.approx(checksum(dtype=torch.bfloat16))


def test_revision(results: dict[str, Any]) -> None:
    assert results["revision"]["checksum"] == pytest.approx(checksum(seed=1))


def test_plain_model(results: dict[str, Any]) -> None:
    assert results["plain"]["class"] == "Qwen3ForCausalLM"


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("gated", ["z-lab/gated", "gated"]),
        ("auto gated", ["z-lab/gated", "gated"]),
        ("no repository", ["z-lab/nothing"]),
        ("no revision", ["v9", "z-lab/single"]),
        ("no config", ["z-lab/no-config", "config.json"]),
        ("no weights", ["z-lab/no-weights", "safetensors"]),
        ("no shard", ["z-lab/no-shard", SHARD]),
        ("pickle", ["z-lab/pickle", "safetensors", "pickle"]),
        ("bad config", ["config.json", "JSON"]),
        ("auto bad config", ["config.json", "JSON"]),
        ("damaged", ["z-lab/damaged", SHARD, "damaged"]),
        ("cut", ["00001-of-00002"]),
        ("not cached", ["cached files"]),
    ],
)
def test_failures_say_what_and_where(results: dict[str, Any], name: str, parts: list[str]) -> None:
    assert "error" in results[name], results[name]
    for part in parts:
        assert part in results[name]["message"], results[name]


def test_a_cut_download_leaves_no_file_behind(results: dict[str, Any], root: Path) -> None:
    snapshots = root / "home" / "hub" / "models--z-lab--cut" / "snapshots"
    assert not list(snapshots.rglob("model-00001-of-00002.safetensors"))


def test_pickles_are_not_even_fetched(results: dict[str, Any]) -> None:
    assert not [request for request in results["requests"] if request.endswith(".bin")]


def test_offline(results: dict[str, Any], root: Path) -> None:
    """This process has HF_HUB_OFFLINE set and no server: everything comes from the cache."""
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    cache = root / "home" / "hub"
    model = DFlashModel.from_pretrained("z-lab/sharded", cache_dir=cache)
    assert sum(value.double().abs().sum().item() for value in model.state_dict().values()) == pytest.approx(checksum())
    with pytest.raises(OSError, match="cached files"):
        DFlashModel.from_pretrained("z-lab/never", cache_dir=cache)
