"""
The stored form of any type, by its annotation or without one.

Where an annotation says what a value is, it is stored in a plain, readable form. Elsewhere it
stands in a small document of its own: ``{"__type__": "uuid", "value": "..."}``.
"""

from __future__ import annotations

import enum
import types
from collections import abc
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Final, Literal, NewType, Union, get_args, get_origin

from bson.int64 import Int64

from mscheduler_sync._declared import classes
from mscheduler_sync._declared.forms import (
    Fault,
    Form,
    converted,
    each,
    each_value,
    expect,
    mismatch,
    type_name,
)
from mscheduler_sync._declared.table import TABLE, Codec

#: Marks a document that stands for a value of another type. A mapping of the application's that
#: has such a key is stored inside such a document, so that the two cannot be confused.
TAG: Final = "__type__"

_NONE: Final = type(None)
#: What BSON holds as it is, and what counts as one.
_SCALARS: Final[Mapping[Any, tuple[type, ...]]] = {
    str: (str,),
    int: (int,),
    float: (float, int),
    bool: (bool,),
    bytes: (bytes,),
    _NONE: (_NONE,),
}
_LISTS: Final = frozenset({list, abc.Sequence, abc.MutableSequence})
_MAPPINGS: Final = frozenset({dict, abc.Mapping, abc.MutableMapping})
_SETS: Final[Mapping[Any, type]] = {
    set: set,
    abc.Set: set,
    abc.MutableSet: set,
    frozenset: frozenset,
}
#: Containers that only a tag tells from a list.
_CONTAINERS: Final[Mapping[str, type]] = {"tuple": tuple, "set": set, "frozenset": frozenset}
_CONTAINER_TAGS: Final = {kind: tag for tag, kind in _CONTAINERS.items()}


class Values:
    """
    The stored forms of all types, by the table and the application's *codecs*. Thread-safe.

    Raises:
        ValueError: If two codecs have one name.
    """

    def __init__(self, codecs: Iterable[Codec[Any]] = ()) -> None:
        self._rows = {row.type: row for row in (*TABLE, *codecs)}
        self._by_name = {row.name: row for row in self._rows.values()}
        names = [*(row.name for row in self._rows.values()), "dict", *_CONTAINERS]
        if len(set(names)) < len(names):
            msg = f"two codecs have one name: {', '.join(sorted(names))}"
            raise ValueError(msg)
        self._forms: dict[Any, Form] = {}
        #: Of what no annotation describes.
        self.untyped: Final = Form(self._encode, self._decode, "any value")

    def form_of(self, annotation: Any) -> Form:
        """
        Return how values of the type *annotation* are stored.

        Raises:
            ImportError: If the type takes a package that is missing; the text says which.
        """
        try:
            form = self._forms.get(annotation)
        except TypeError:  # not hashable, and so not remembered
            return self._made(annotation)
        if form is None:
            form = self._forms[annotation] = self._made(annotation)
        return form

    def _made(self, annotation: Any) -> Form:
        annotation = _unwrapped(annotation)
        kind, members = get_origin(annotation) or annotation, get_args(annotation)
        if kind in (Union, types.UnionType):
            return self._optional(members)
        if kind is Literal:
            return self._literal(members)
        if not isinstance(kind, type):
            return self.untyped
        row = self._row_of(kind)
        if row is not None:
            return self._row_form(row)
        if kind in _SCALARS:
            return _scalar(kind)
        if kind in _LISTS:
            return self._members((list, tuple), list, members)
        if kind in _SETS:
            return self._members((set, frozenset), _SETS[kind], members)
        if kind in _MAPPINGS:
            return self._mapping(members)
        if kind is tuple:
            return self._tuple(members)
        return classes.form_of(annotation, self) or self.untyped

    # -- by annotation -----------------------------------------------------------------------

    def _row_form(self, row: Codec[Any]) -> Form:
        what = type_name(row.type)

        def encode(value: Any) -> Any:
            own = self._row_of(type(value))
            # A datetime is a date, and yet stored otherwise; a Path is a PurePath, stored alike.
            if own is not row and (own is None or own.encode is not row.encode):
                raise mismatch(what, value)
            return self._written(row, value)

        return Form(encode, lambda stored: self._read(row, stored), what)

    def _members(self, accepted: tuple[type, ...], kind: type, arguments: tuple[Any, ...]) -> Form:
        what = f"a {kind.__name__}"
        member = self.form_of(arguments[0]) if arguments else self.untyped

        def encode(value: Any) -> Any:
            return each(member.encode, expect(value, accepted, what))

        def decode(stored: Any) -> Any:
            members = each(member.decode, expect(stored, list, "a list"))
            return converted(kind, members, what)

        return Form(encode, decode, what)

    def _tuple(self, arguments: tuple[Any, ...]) -> Form:
        if not arguments or arguments[-1] is Ellipsis:
            return self._members((tuple,), tuple, arguments[:1])
        forms = [] if arguments == ((),) else [self.form_of(one) for one in arguments]
        what = f"a tuple of {len(forms)}"

        def encode(value: Any) -> Any:
            if not isinstance(value, tuple) or len(value) != len(forms):
                raise mismatch(what, value)
            following = iter(forms)
            return each(lambda one: next(following).encode(one), value)

        def decode(stored: Any) -> Any:
            if len(expect(stored, list, "a list")) != len(forms):
                raise mismatch(what, stored)
            following = iter(forms)
            return tuple(each(lambda one: next(following).decode(one), stored))

        return Form(encode, decode, what)

    def _mapping(self, arguments: tuple[Any, ...]) -> Form:
        # Without annotation of its values a mapping may hold tagged documents, and be one.
        form = self.form_of(arguments[1]) if arguments else self.untyped
        typed = form is not self.untyped

        def encode(value: Any) -> Any:
            expect(value, abc.Mapping, "a mapping")
            return each_value(form.encode, value) if typed else self._encode(dict(value))

        def decode(stored: Any) -> Any:
            value = expect(stored if typed else self._decode(stored), abc.Mapping, "a mapping")
            return each_value(form.decode, value) if typed else value

        return Form(encode, decode, "a mapping")

    def _literal(self, choices: tuple[Any, ...]) -> Form:
        what = f"one of {', '.join(map(repr, choices))}"
        plain = [one.value if isinstance(one, enum.Enum) else one for one in choices]

        def exchanged(value: Any, ours: Iterable[Any], theirs: Iterable[Any]) -> Any:
            for one, other in zip(ours, theirs, strict=True):
                if one == value and type(one) is type(value):
                    return other
            raise mismatch(what, value)

        return Form(
            lambda value: exchanged(value, choices, plain),
            lambda stored: exchanged(stored, plain, choices),
            what,
        )

    def _optional(self, members: tuple[Any, ...]) -> Form:
        others = [member for member in map(_unwrapped, members) if member not in (None, _NONE)]
        form = self.form_of(others[0]) if len(others) == 1 else self._choice(others)
        if len(others) == len(members):
            return form
        return Form(
            lambda value: None if value is None else form.encode(value),
            lambda stored: None if stored is None else form.decode(stored),
            f"{form.what} or None",
        )

    def _choice(self, members: list[Any]) -> Form:
        """
        Of several types, those that BSON holds are stored plainly, and others tagged, as without
        annotation: it alone does not tell them apart. Classes have their own name as tag.
        """
        kinds: list[type] = []
        tagged: dict[type, tuple[str, Form]] = {}
        for member in members:
            kind = get_origin(member) or member
            if not isinstance(kind, type):
                return self.untyped
            kinds += _SCALARS.get(kind, (kind,))
            form = classes.form_of(member, self)
            if form is not None:
                tagged[kind] = (kind.__qualname__, form)
        forms = dict(tagged.values())
        what = " or ".join(type_name(kind) for kind in dict.fromkeys(kinds))
        if len(forms) < len(tagged):
            msg = f"{what}: two of these classes have one name, so nothing tells them apart"
            raise TypeError(msg)
        accepted = tuple(kinds)

        def encode(value: Any) -> Any:
            if type(expect(value, accepted, what)) in tagged:
                name, form = tagged[type(value)]
                return {TAG: name, "value": form.encode(value)}
            return self._encode(value)

        def decode(stored: Any) -> Any:
            form = forms.get(str(stored.get(TAG))) if isinstance(stored, abc.Mapping) else None
            if form is not None:
                return form.decode(stored.get("value"))
            return expect(self._decode(stored), accepted, what)

        return Form(encode, decode, what)

    # -- without annotation ------------------------------------------------------------------

    def _encode(self, value: Any) -> Any:
        kind = type(value)
        if kind in _SCALARS:
            return value
        if isinstance(value, dict):
            stored = each_value(self._encode, value)
            return {TAG: "dict", "value": stored} if TAG in stored else stored
        if isinstance(value, list):
            return each(self._encode, value)
        if kind in _CONTAINER_TAGS:
            return {TAG: _CONTAINER_TAGS[kind], "value": each(self._encode, value)}
        row = self._row_of(kind)
        if row is not None:
            return {TAG: row.name, "value": self._written(row, value)}
        if isinstance(value, tuple):
            problem = f"is the named tuple {type_name(kind)}, which has no stored form"
            raise Fault(problem)
        if classes.is_known(kind):
            problem = f"is {type_name(kind)}, which is stored only where an annotation names it"
            raise Fault(problem)
        # BSON has a type for it, or the client's own type registry; otherwise it is refused there.
        return value

    def _decode(self, stored: Any) -> Any:
        if isinstance(stored, list):
            return each(self._decode, stored)
        if not isinstance(stored, abc.Mapping):
            return stored
        tag, value = stored.get(TAG), stored.get("value")
        if tag is None:
            return each_value(self._decode, stored)
        if tag == "dict" and isinstance(value, abc.Mapping):
            return each_value(self._decode, value)
        if tag in _CONTAINERS and isinstance(value, list):
            return converted(_CONTAINERS[tag], each(self._decode, value), f"a {tag}")
        row = self._by_name.get(tag) if isinstance(tag, str) else None
        if row is None:
            problem = f"has the {TAG} {tag!r}, which has no codec here"
            raise Fault(problem)
        return self._read(row, value)

    # -- rows of the table -------------------------------------------------------------------

    def _row_of(self, kind: type) -> Codec[Any] | None:
        if kind in self._rows:
            return self._rows[kind]
        return next((self._rows[base] for base in kind.__mro__ if base in self._rows), None)

    def _written(self, row: Codec[Any], value: Any) -> Any:
        try:
            stored = row.encode(value)
        except Exception as error:
            problem = f"cannot be stored: {type(error).__name__}: {error}"
            raise Fault(problem) from error
        return self._encode(stored)

    def _read(self, row: Codec[Any], stored: Any) -> Any:
        return converted(row.decode, self._decode(stored), type_name(row.type))


def _scalar(kind: type) -> Form:
    accepted, what = _SCALARS[kind], "None" if kind is _NONE else kind.__name__

    def encode(value: Any) -> Any:
        return expect(value, accepted, what)

    def decode(stored: Any) -> Any:
        is_whole = isinstance(stored, float) and stored.is_integer()
        if kind is int and (is_whole or isinstance(stored, Int64)):
            # Other languages write whole numbers so, and BSON large ones.
            return int(stored)
        return float(encode(stored)) if kind is float else encode(stored)

    return Form(encode, decode, what)


def _unwrapped(annotation: Any) -> Any:
    """
    Return what stands behind ``Annotated``, ``NewType`` and ``type`` aliases.
    """
    while True:
        if get_origin(annotation) is Annotated:
            annotation = get_args(annotation)[0]
        elif isinstance(annotation, NewType):
            annotation = annotation.__supertype__
        elif type(annotation).__name__ == "TypeAliasType":
            annotation = annotation.__value__
        elif annotation is None:
            return _NONE
        else:
            return annotation
