"""Shapes of a request and of an output: classes between the client and the kernels that carry them.

A class is a shape of a request if it has a field for the prompt or the sampling parameters. It is
a shape of an output if it has a field for token ids and is no shape of a request. A wrapper is a
class with a field of such a class, not of a collection of them. Fields are annotated names of a
class, properties, and attributes that `__init__` sets. Messages of the protocols are counted by
the same names. `NOT_SHAPES` names the classes with such fields that are no shapes, and why.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.product_code import FUNCTIONS, Module

# Packages between the client and the kernels. The client library and the CLI are not among them.
PACKAGES = (
    "router",
    "prefill_node",
    "decode_node",
    "node",
    "serving",
    "rpc",
    "engine",
    "kv_transfer",
)
REQUEST_FIELDS = {"prompt", "prompt_token_ids"}
REQUEST_TYPES = {"SamplingParams", "Prompt"}
OUTPUT_FIELDS = {"token_id", "token_ids", "first_token_id"}
# Classes and messages with such fields that carry neither a request nor an output, by reason.
NOT_SHAPES = {
    "a prompt without parameters": {
        "TokenPrompt", "EchoedPrompt", "SharedPrompt", "PromptPlacement",
    },
    "belongs to a call that generates nothing": {
        "TokenizeTextBody", "TokenizeResponse", "DetokenizeRequest",
    },
    "an event of the prefix cache": {"BlockStored"},
    "the tensors of a whole forward pass": {"Step", "Peaks"},
    "a value inside the shapes, passed on unchanged like SamplingParams": {
        "TokenLogprobs", "TopLogprob",
    },
    "a state machine that turns one shape into the next": {"AnswerAssembler", "CompletionChoice"},
}  # fmt: skip
OTHERS = {name for names in NOT_SHAPES.values() for name in names}


@dataclass(frozen=True, slots=True)
class Shape:
    place: str
    name: str
    wraps: str = ""  # the shape that it has a field of

    def __str__(self) -> str:
        return f"{self.place} {self.name}" + (f" (wraps {self.wraps})" if self.wraps else "")


@dataclass(frozen=True, slots=True)
class Shapes:
    carriers: list[Shape]
    wrappers: list[Shape]


@dataclass(frozen=True, slots=True)
class _Class:
    place: str
    name: str
    fields: Mapping[str, str]  # annotation by name; "" if there is none


def class_shapes(modules: Sequence[Module]) -> tuple[Shapes, Shapes]:
    """Find the shapes of a request and of an output among the classes of the product."""
    on_path = [module for module in modules if module.path.parts[0] in PACKAGES]
    return _requests_and_outputs([each for module in on_path for each in _classes(module)])


def message_shapes(protos: Mapping[str, str]) -> tuple[Shapes, Shapes]:
    """Find the shapes among the messages of .proto files, given their texts by path."""
    return _requests_and_outputs(
        [each for path, text in protos.items() for each in _messages(path, text)]
    )


def read_protos(root: Path) -> dict[str, str]:
    paths = sorted((root / "protos").glob("**/*.proto"))
    return {str(path.relative_to(root)): path.read_text(encoding="utf-8") for path in paths}


def _requests_and_outputs(classes: Sequence[_Class]) -> tuple[Shapes, Shapes]:
    requests = _shapes(classes, _carries_request)
    known = {shape.name for shape in (*requests.carriers, *requests.wrappers)}
    others = [each for each in classes if each.name not in known]
    return requests, _shapes(others, _carries_output)


def _carries_request(each: _Class) -> bool:
    has_type = any(_plain(annotation) in REQUEST_TYPES for annotation in each.fields.values())
    return has_type or not REQUEST_FIELDS.isdisjoint(each.fields)


def _carries_output(each: _Class) -> bool:
    return not OUTPUT_FIELDS.isdisjoint(each.fields)


def _shapes(classes: Sequence[_Class], is_carrier: Callable[[_Class], bool]) -> Shapes:
    classes = [each for each in classes if each.name not in OTHERS]
    carriers = {each.name: Shape(each.place, each.name) for each in classes if is_carrier(each)}
    wrappers = []
    for each in classes:
        held = [_plain(annotation) for annotation in each.fields.values()]
        wrapped = next((name for name in held if name in carriers), "")
        if wrapped and each.name not in carriers:
            wrappers.append(Shape(each.place, each.name, wrapped))
    return Shapes(list(carriers.values()), wrappers)


def _plain(annotation: str) -> str:
    """Return the class of an annotation without its module and without `| None`."""
    return annotation.removesuffix(" | None").rpartition(".")[2]


def _classes(module: Module) -> Iterator[_Class]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ClassDef):
            yield _Class(f"{module.path}:{node.lineno}", node.name, dict(_fields(node)))


def _fields(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for member in node.body:
        if isinstance(member, ast.AnnAssign) and isinstance(member.target, ast.Name):
            yield member.target.id, ast.unparse(member.annotation)
        elif isinstance(member, FUNCTIONS) and member.name == "__init__":
            yield from _attributes(member)
        elif isinstance(member, FUNCTIONS) and _is_property(member) and member.returns is not None:
            yield member.name, ast.unparse(member.returns)


def _is_property(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(ast.unparse(each) == "property" for each in function.decorator_list)


def _attributes(init: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[tuple[str, str]]:
    """Yield the attributes that `__init__` sets, with their own or their parameter's annotation."""
    annotations = {
        each.arg: ast.unparse(each.annotation)
        for each in (*init.args.args, *init.args.kwonlyargs)
        if each.annotation is not None
    }
    for node in ast.walk(init):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Attribute):
            yield node.target.attr.lstrip("_"), ast.unparse(node.annotation)
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
            value = node.value.id if isinstance(node.value, ast.Name) else ""
            yield node.targets[0].attr.lstrip("_"), annotations.get(value, "")


def _messages(path: str, text: str) -> Iterator[_Class]:
    for match in re.finditer(r"^message (\w+) \{(.*?)^\}", text, re.MULTILINE | re.DOTALL):
        line = text[: match.start()].count("\n") + 1
        fields = re.findall(
            r"^\s+(?:optional |repeated )?([\w.]+) (\w+) = \d+", match[2], re.MULTILINE
        )
        yield _Class(f"{path}:{line}", match[1], {name: kind for kind, name in fields})
