"""The text below each field of a model, read from its source when asked for: pydantic would read it at each start."""

import ast
import functools
import inspect
import sys
from typing import Any

from pydantic import BaseModel


def field_docs(kind: type[BaseModel]) -> dict[str, str]:
    """The text below each field, of this class and of those it inherits from."""
    docs: dict[str, str] = {}
    for cls in reversed(kind.__mro__):
        if issubclass(cls, BaseModel) and cls is not BaseModel:
            docs |= _texts(cls.__module__).get(cls.__name__, {})
    return docs


def describe(kind: type[BaseModel], schema: dict[str, Any]) -> None:
    """Add the texts to the JSON schema of this model."""
    for field, text in field_docs(kind).items():
        key = kind.model_fields[field].alias or field if field in kind.model_fields else ""
        if key in schema.get("properties", {}):
            schema["properties"][key].setdefault("description", text)


def models_below(kind: type[BaseModel]) -> set[type[BaseModel]]:
    """Models used in the fields of this one, at any depth."""
    found: set[type[BaseModel]] = set()
    waiting: list[Any] = [info.annotation for info in kind.model_fields.values()]
    while waiting:
        annotation = waiting.pop()
        if isinstance(annotation, type) and issubclass(annotation, BaseModel) and annotation not in found:
            found.add(annotation)
            waiting += [info.annotation for info in annotation.model_fields.values()]
        waiting += getattr(annotation, "__args__", ())
    return found


@functools.cache
def _texts(module: str) -> dict[str, dict[str, str]]:
    """The text below each field of each class of a module."""
    return {
        cls.name: {
            field.target.id: " ".join(text.value.value.split())
            for field, text in zip(cls.body, cls.body[1:], strict=False)
            if isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(text, ast.Expr)
            and isinstance(text.value, ast.Constant)
            and isinstance(text.value.value, str)
        }
        for cls in ast.parse(inspect.getsource(sys.modules[module])).body
        if isinstance(cls, ast.ClassDef)
    }
