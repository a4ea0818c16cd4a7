"""
Enums, dataclasses, attrs classes and pydantic models: stored where an annotation names them.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import typing
from collections.abc import Callable, Mapping
from typing import Any, Protocol, get_origin

import attrs

from mscheduler_sync._declared.forms import Fault, Form, converted, expect, type_name


class FormSource(Protocol):
    """
    What knows the forms of members.
    """

    @property
    def untyped(self) -> Form: ...

    def form_of(self, annotation: Any) -> Form: ...


def is_known(kind: type) -> bool:
    """
    Return whether *kind* is a class of one of these sorts.
    """
    return issubclass(kind, enum.Enum) or _has_fields(kind) or _is_pydantic(kind)


def form_of(annotation: Any, forms: FormSource) -> Form | None:
    """
    Return how instances of a class are stored, or None if it is of none of these sorts.

    Raises:
        ImportError: If cattrs is needed and missing.
    """
    kind = get_origin(annotation) or annotation
    if not isinstance(kind, type):
        return None
    if issubclass(kind, enum.Enum):
        return _enum_form(kind, forms)
    if _is_pydantic(kind):
        return _pydantic_form(kind)
    if _has_fields(kind):
        return _fields_form(annotation, kind, forms)
    return None


def _is_pydantic(kind: type) -> bool:
    return hasattr(kind, "__pydantic_validator__") and hasattr(kind, "model_validate_json")


def _has_fields(kind: type) -> bool:
    return attrs.has(kind) or dataclasses.is_dataclass(kind)


def _enum_form(kind: type[enum.Enum], forms: FormSource) -> Form:
    what = type_name(kind)

    def encode(value: Any) -> Any:
        return forms.untyped.encode(expect(value, kind, what).value)

    return Form(encode, lambda stored: converted(kind, forms.untyped.decode(stored), what), what)


def _check_class(value: object, kind: type) -> None:
    if isinstance(value, kind) and type(value) is not kind:
        problem = f"is the subclass {type_name(type(value))}, whose own fields would get lost"
        raise Fault(problem, kind=TypeError)
    expect(value, kind, type_name(kind))


# -- pydantic --------------------------------------------------------------------------------


def _pydantic_form(kind: Any) -> Form:
    """
    By the model's own methods, with the names of its fields, in pydantic's JSON forms.
    """
    what = type_name(kind)

    def encode(value: Any) -> Any:
        _check_class(value, kind)
        try:
            return value.model_dump(mode="json", by_alias=False, round_trip=True)
        except Exception as error:  # also of the model's own serializers
            problem = f"cannot be stored: {error}"
            raise Fault(problem) from error

    def decode(stored: Any) -> Any:
        # Not from Python values: a strict model takes texts for dates from JSON only.
        text = json.dumps(expect(stored, Mapping, "a mapping"), default=_as_json)
        try:
            return kind.model_validate_json(text, by_alias=False, by_name=True)
        except ValueError as error:
            raise _pydantic_fault(error, what) from error

    return Form(encode, decode, what)


def _as_json(value: Any) -> str:
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def _pydantic_fault(error: Any, what: str) -> Fault:
    faults = error.errors() if hasattr(error, "errors") else ()
    if not faults:
        return Fault(f"is no readable form of {what}: {error}")
    steps = (f"[{step}]" if isinstance(step, int) else f".{step}" for step in faults[0]["loc"])
    return Fault(f"is refused by {what}: {faults[0]['msg']}").at("".join(steps))


# -- dataclasses and attrs classes -----------------------------------------------------------


def _fields_form(annotation: Any, kind: type, forms: FormSource) -> Form:
    """
    By cattrs, with the names of the fields; each field in the form of its own annotation.
    """
    what = type_name(kind)
    unstructure, structure = _hooks(annotation, what, forms)

    def encode(value: Any) -> Any:
        _check_class(value, kind)
        try:
            return unstructure(value)
        except Fault as fault:
            raise fault.at(_faulty_field(value, kind, forms)) from fault.__cause__

    def decode(stored: Any) -> Any:
        expect(stored, Mapping, "a mapping")
        try:
            return structure(stored, annotation)
        except Exception as error:
            raise _cattrs_fault(error, what) from error

    return Form(encode, decode, what)


def _hooks(
    annotation: Any, what: str, forms: FormSource
) -> tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]:
    """
    Return the functions that cattrs makes for one class; what its fields hold is left to *forms*.
    """
    try:
        import cattrs
        from cattrs.gen import make_dict_structure_fn, make_dict_unstructure_fn
    except ImportError as error:
        msg = (
            f"{what} is stored by the package cattrs, which is missing: "
            "pip install 'mscheduler_sync[cattrs]'"
        )
        raise ImportError(msg) from error
    converter = cattrs.Converter()

    def late(step: str) -> Callable[[Any], Callable[..., Any]]:
        # Found at the first value: a class may have fields of its own type.
        def hook_for(inner: Any) -> Callable[..., Any]:
            return lambda value, *_: getattr(forms.form_of(inner), step)(value)

        return hook_for

    converter.register_unstructure_hook_factory(lambda _: True, late("encode"))
    converter.register_structure_hook_factory(lambda _: True, late("decode"))
    return (
        make_dict_unstructure_fn(annotation, converter),
        make_dict_structure_fn(annotation, converter),
    )


def _faulty_field(value: Any, kind: type, forms: FormSource) -> str:
    """
    Return the step to the first field of *value* that cannot be stored.
    """
    for name, annotation in typing.get_type_hints(kind).items():
        try:
            forms.form_of(annotation).encode(getattr(value, name, None))
        except Fault:
            return f".{name}"
    return ""


def _cattrs_fault(error: Exception, what: str) -> Fault:
    """
    Return the first fault that a group of cattrs' holds, with its place.
    """
    import cattrs

    if isinstance(error, cattrs.ClassValidationError):
        fields, _ = error.group_exceptions()
        if fields:
            inner, note = fields[0]
            step = f".{note.name}"
            if isinstance(inner, Fault):
                return inner.at(step)
            problem = "is missing" if isinstance(inner, KeyError) else f"is refused: {inner}"
            return Fault(problem).at(step)
        error = next((one for one in error.exceptions if isinstance(one, Exception)), error)
    return Fault(f"is no readable form of {what}: {type(error).__name__}: {error}")
