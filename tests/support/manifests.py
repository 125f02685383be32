"""Kubernetes manifests as files and as rendered by kustomize."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.yaml_files import parse_yaml, read_yaml

ROOT = Path(__file__).parents[2] / "deploy/kubernetes"
OVERLAYS = sorted(path.name for path in (ROOT / "overlays").iterdir())
NODES = ("prefill", "decode", "encode")

Manifest = dict[str, Any]


def kustomizations() -> list[Path]:
    return sorted(ROOT.rglob("kustomization.yaml"))


def listed(kustomization: Path) -> list[Path]:
    """Return the files and folders that a kustomization lists."""
    reported = read_yaml(kustomization)
    generated = [file for one in reported.get("configMapGenerator", []) for file in one["files"]]
    patches = [one["path"] for one in reported.get("patches", []) if "path" in one]
    taken = [*reported.get("resources", []), *reported.get("components", []), *generated, *patches]
    return [(kustomization.parent / name).resolve() for name in taken]


@cache
def written(folder: Path = ROOT) -> list[Manifest]:
    """Return the manifests of base and components, or of one of these, without overlays."""
    lists = {path.parent: read_yaml(path) for path in sorted(folder.rglob("kustomization.yaml"))}
    files = [
        folder / name
        for folder, reported in lists.items()
        for name in reported.get("resources", [])
        if name.endswith(".yaml")
    ]
    return [one for file in files for one in parse_yaml(file.read_text())]


def find(kind: str, name: str) -> Manifest:
    [found] = [one for one in written() if (one["kind"], one["metadata"]["name"]) == (kind, name)]
    return found


def workload(component: str) -> Manifest:
    return find("Deployment" if component == "router" else "StatefulSet", component)


def pod(component: str) -> Manifest:
    template: Manifest = workload(component)["spec"]["template"]
    return template


def container(component: str) -> Manifest:
    [found] = pod(component)["spec"]["containers"]
    one: Manifest = found
    return one


@cache
def rendered(overlay: str) -> list[Manifest]:
    """Return the manifests of an overlay. Skips the test without kubectl and kustomize."""
    return render(ROOT / "overlays" / overlay)


def render_with(folder: Path, overlay: str, *components: str) -> list[Manifest]:
    """Render an overlay with further components, by a kustomization written into `folder`."""
    taken = {
        "resources": [f"overlays/{overlay}"],
        "components": [f"components/{e}" for e in components],
    }
    paths = {
        kind: [os.path.relpath(ROOT / name, folder.resolve()) for name in names]
        for kind, names in taken.items()
    }
    (folder / "kustomization.yaml").write_text(json.dumps({"kind": "Kustomization", **paths}))
    return render(folder)


def render(folder: Path) -> list[Manifest]:
    if shutil.which("kustomize"):
        command = ["kustomize", "build"]
    elif shutil.which("kubectl"):
        command = ["kubectl", "kustomize"]
    else:
        pytest.skip("neither kubectl nor kustomize is installed")
    ended = subprocess.run([*command, str(folder)], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return parse_yaml(ended.stdout)
